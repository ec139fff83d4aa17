"""Pure logic on tensors and numbers: geometry, summaries, scorers, residency, swap plans, the pipeline.

Start reading here. Nothing in this folder imports vLLM; it may import torch, numpy and pydantic only.
"""
