"""How lm-eval finds us. Nothing is imported here: `bridge` passes at every interpreter start."""
