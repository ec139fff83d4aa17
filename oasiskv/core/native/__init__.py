"""C++ sources of the compiled kernels, and the library that the installation makes of them."""
