"""Page stores: where full KV lives when it is not on the device. May import `core`, never vLLM."""
