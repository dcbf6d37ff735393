"""Commands that score, plan and cut; a model's own answers, on which plans are calibrated and students are trained."""
