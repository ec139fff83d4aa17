"""`oasiskv doctor`: what is installed, what vLLM makes of this machine, and what to do where something is wrong.

Start with `finding`; a topic is a file, its checks fed with facts, so that a test can give them others. Checks import
neither vLLM nor torch: these are asked in a Python of their own (`fresh`, `sections`). May import `vllm_plugin`.
"""
