"""The action of an alarm (`mismatch.alarm.on_alarm=rescue`), and the preset `learning_rate`."""
