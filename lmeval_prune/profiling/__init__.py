"""What a model costs: parameters, arithmetic, time and memory."""
