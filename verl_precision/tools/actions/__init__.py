"""What an alarm does beside speaking (`mismatch.alarm.on_alarm=rescue`), and the preset `learning_rate`."""
