"""What a run tells of before anybody looks: signs that something is wrong, and who is told."""
