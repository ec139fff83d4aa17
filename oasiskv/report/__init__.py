"""What every measurement ends in: numbers with their spread, what they were made with, tables, a page with plots.

May import nothing of OasisKV but its version.
"""
