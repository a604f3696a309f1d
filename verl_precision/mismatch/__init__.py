"""The training-inference mismatch, measured at every step.

statistics      what is measured, as pure functions of log-prob tensors
trainer         verl's trainers, with the statistics among their metrics (`trainer.v1.trainer_mode=vp_sync`, ...)
alarm           says when a run is on its way to collapse, and what to do; fed the metrics of each step
alarm_settings  its thresholds and sensitivity
detector        sustained growth, and persistence, of one number a step
remedies        what each alarm means and what to try
keys            names of the metrics read
"""
