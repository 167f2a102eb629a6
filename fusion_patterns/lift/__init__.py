"""Recognisers: from a value of a graph to the building block that computes it, or to the reason why it is none.

Nothing is rewritten to be recognised. Each recogniser takes `(value, facts)` and returns a frozen description or a
`Miss`; results are remembered per value, so a shared value is looked at once and a whole search stays linear.
"""
