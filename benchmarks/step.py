"""`python -m benchmarks.step`: the same as `anon bench`, for machines that have torch and nothing else."""

from anon_lab.bench import main

if __name__ == "__main__":
    main()
