"""Rewards for mathematics and reasoning-gym: functions that a recipe names under `reward.custom_reward_function`."""
