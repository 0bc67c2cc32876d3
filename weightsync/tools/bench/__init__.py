"""`weightsync bench`: how long a push takes, beside what others do and what the machine could do at best."""
