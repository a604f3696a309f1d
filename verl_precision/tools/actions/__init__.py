"""What an alarm does beside speaking (`mismatch.alarm.on_alarm`): mask, lower the learning rate, rescue the run."""
