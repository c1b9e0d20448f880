"""What to look at when a run is slow, wrong or not yet started: timing, doctor, plan, lr_find, overfit, profiling."""
