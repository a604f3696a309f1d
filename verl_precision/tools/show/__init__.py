"""Tables and figures, with one look for all verbs.

figures   figures of one look, as PNG files
tables    rows on the terminal and in Markdown; JSON; numbers for readers
"""
