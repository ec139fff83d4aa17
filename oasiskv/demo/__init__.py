"""``make demo``: a real model, long prompts, and stock vLLM beside OasisKV in the same KV memory.

``documents`` makes the prompts, ``plan`` the engines to compare (``bench`` runs them), ``outcome`` and ``report`` hold
what came out. Nothing outside this folder imports from it.
"""
