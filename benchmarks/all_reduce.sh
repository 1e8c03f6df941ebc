#!/bin/sh
# Compares in-process ranks with Open MPI on this machine. Usage: all_reduce.sh THREADS_PROGRAM MPI_PROGRAM [ROUNDS]
# The programs run in turn, so that a slow time of the machine affects both. The best time of the rounds counts.
threads=$1
mpi=$2
rounds=${3:-2}
sizes=${SIZES:-1024 65536 1048576 16777216 67108864}
ranks_list=${RANKS:-2 4 8}
printf '%6s %10s %14s %14s %14s %8s\n' ranks bytes 'threads us' 'Open MPI us' 'plait::mpi us' ratio
for ranks in $ranks_list; do
  for bytes in $sizes; do
    results=
    i=0
    while [ "$i" -lt "$rounds" ]; do
      a=$("$threads" "$ranks" "$bytes")
      b=$(mpirun --allow-run-as-root --oversubscribe -n "$ranks" "$mpi" "$bytes" 2>/dev/null)
      c=$(mpirun --allow-run-as-root --oversubscribe -n "$ranks" "$mpi" "$bytes" plait 2>/dev/null)
      results="$results$a $b $c
"
      i=$((i + 1))
    done
    printf '%s' "$results" | awk -v ranks="$ranks" -v bytes="$bytes" '
      NR == 1 || $1 < a { a = $1 }
      NR == 1 || $2 < b { b = $2 }
      NR == 1 || $3 < c { c = $3 }
      END { printf "%6d %10d %14.1f %14.1f %14.1f %8.2f\n", ranks, bytes, a, b, c, b / a }'
  done
done
