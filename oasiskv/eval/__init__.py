"""Measuring quality: what do the chosen blocks hold of the softmax mass, and what does that do to the text?

``coverage`` runs policies side by side through a Hugging Face model; ``retrieval`` is the command that reports on
key-value retrieval (``texts``). It uses the classes of ``core`` and no vLLM: an independent look at the policy itself.
"""
