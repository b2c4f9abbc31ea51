"""Auto Tuning of Ascend's MindSpeed, and Auto Settings, its successor: their flags, their space, what they print."""
