// Bench compares this library with what else there is: valkey-go over TCP, Valkey's own C client over RDMA and over TCP, and
// the limits that perftest measures on the same device. It runs where RDMA works and starts its own servers there; "make
// bench" runs it in the laboratory.
//
// The contestants of a case take turns, round by round, so that what else the machine does hits all of them alike. Each has a
// server of its own. A comparison is a ratio within one round, and what is reported is the median of these ratios with the
// smallest and the largest.
//
// A run writes its results to a directory: results.csv, one line for each contestant of each case in each round;
// results.txt, the same for benchstat; environment.txt; and report.txt, the tables that it prints. "bench -report" and "bench
// -plot" make tables and plots of them at any time, on any machine.
package main
