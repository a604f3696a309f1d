"""The training-inference mismatch, measured at every step.

statistics  what is measured, as pure functions of log-prob tensors
trainer     verl's trainers, with the statistics among their metrics (`trainer.v1.trainer_mode=vp_sync`, ...)
"""
