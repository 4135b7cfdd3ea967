"""What every suite needs: cases, timing, correctness, memory, reports."""
