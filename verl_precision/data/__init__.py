"""The paper's data sets in verl's format (`verl-precision data NAME`).

catalog     which data set is where, how many problems it has, and by whose word
layouts     the columns of each, to question and answer (pure)
templates   question to chat messages, for each family of models (pure)
prepare     read, check, convert, write
stand_in    a few sums in the columns of each data set, for machines without network
answer_tag  reward for answers in <answer> tags, with verl's signature
command     the command line
"""
