"""Tables and figures, with one look for all verbs.

figures   axes of one look
tables    rows on the terminal and in Markdown; JSON; numbers as people read them
"""
