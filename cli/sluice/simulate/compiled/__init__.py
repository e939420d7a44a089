"""`pod.Pod` in C++, built at first use: the same runs, several tens of times faster."""
