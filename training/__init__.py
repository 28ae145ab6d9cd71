"""Run logs to training rows to fitted predictors: splits, loops, recipes, calibration."""
