"""Diagnose a run that is slow, wrong or not yet started."""
