"""`verl-precision tokens`: metrics, alarms and page from the token dumps that other frameworks write."""
