"""``make demo``: a real model, long prompts, and stock vLLM beside OasisKV in the same KV memory.

``documents`` makes the prompts, ``plan`` the engines to compare, ``engine`` runs one of them in a process of its own
and reports to ``runner``, ``report`` holds the table and the verdict. Nothing outside this folder imports from it.
"""
