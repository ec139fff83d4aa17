"""Measuring speed: stock vLLM and OasisKV in turn, each in a process of its own, with the same KV memory.

``workloads`` says what is asked, ``job`` what an engine's process is told, ``engine`` and ``drive`` run it there,
``process`` starts it, ``rounds`` repeats and pairs, ``figures`` and ``crossover`` say what came out. May import
``report``, ``core``, ``models`` and, inside an engine's process, vLLM.
"""
