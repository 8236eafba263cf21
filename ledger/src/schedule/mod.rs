//! Schedules that run, and count the words, visits and merges that they take.
