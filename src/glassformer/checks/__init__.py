"""Claims about models, checked: functions that return findings."""
