# The report of scripts/conformance. Input, separated by tabs: SUITE TRANSPORT VERDICT NAME SECONDS; or dials SUITE TRANSPORT RDMA
# TCP; or ! WHAT, for a run that was none. table: SUITES NAMES REASON, the first two regular expressions of the whole name.
function explain(suite, name,  i) {
  sub(/ #[0-9]+$/, "", name)
  for (i = 1; i <= entries; i++)
    if (suite ~ "^(" suiteOf[i] ")$" && name ~ "^(" nameOf[i] ")$") {
      used[i] = 1
      return i
    }
  return 0
}
function note(list, line) { lists[list] = lists[list] "  " line "\n" }

BEGIN {
  while ((getline line < table) > 0) {
    if (line ~ /^#/ || line == "") continue
    split(line, column, "\t")
    suiteOf[++entries] = column[1]; nameOf[entries] = column[2]; reason[entries] = column[3]
  }
}
$1 == "!" { note("broken", $2); bad = 1; next }
$1 == "dials" { dials[$2, $3] = $4 " rdma, " $5 " tcp"; next }
{
  verdict[$1, $2, $4] = $3; seconds[$1, $2] += $5
  if (!(($1, $4) in seen)) { seen[$1, $4] = 1; tests[$1] = tests[$1] "\t" $4 }
}
END {
  printf "%-14s %-5s %7s %7s %15s %9s  %s\n", "suite", "over", "passed", "failed", "not applicable", "seconds", "connections"
  n = split(suites, suite, " ")
  for (i = 1; i <= n; i++) {
    s = suite[i]; split("", count)
    m = split(substr(tests[s], 2), name, "\t")
    for (j = 1; j <= m; j++) {
      tcp = verdict[s, "tcp", name[j]]; rdma = verdict[s, "rdma", name[j]]; entry = explain(s, name[j])
      what = s ": " name[j]
      if (tcp == rdma && tcp == "SKIP") {
        note("skipped", what); tcp = rdma = "NA"
      } else if (tcp == "FAIL" && rdma == "FAIL" && entry) {
        na[entry]++; tcp = rdma = "NA"
      } else if (tcp == "PASS" && rdma == "FAIL" && verdict[s, "tcp-lab", name[j]] == "FAIL") {
        note("laboratory", what); rdma = "NA"
      } else if (tcp == "PASS" && rdma == "PASS") {
        if (entry) note("stale", what " (" reason[entry] ")")
      } else {
        bad = 1
        if (tcp == "PASS" && rdma == "FAIL") note("ours", what)
        else if (tcp == "FAIL" && rdma == "FAIL") note("unexplained", what)
        else note("different", what " (tcp " (tcp ? tcp : "did not run") ", rdma " (rdma ? rdma : "did not run") ")")
      }
      count["tcp", tcp]++; count["rdma", rdma]++
    }
    for (t = 1; t <= 2; t++) {
      over = t == 1 ? "tcp" : "rdma"
      printf "%-14s %-5s %7d %7d %15d %9d  %s\n", s, over, count[over, "PASS"], count[over, "FAIL"], count[over, "NA"],
        seconds[s, over], dials[s, over]
    }
  }
  title["broken"] = "Runs that count as failed:"
  title["ours"] = "FAILED OVER RDMA, passed over TCP:"
  title["laboratory"] = "Failed over RDMA and, in the same laboratory, over TCP; passed over TCP on the machine itself:"
  title["unexplained"] = "Failed over both, and not in the table of what is not applicable:"
  title["different"] = "Another difference between TCP and RDMA:"
  title["stale"] = "In the table of what is not applicable, but passed:"
  title["skipped"] = "Skipped by the suite itself:"
  n = split("broken ours laboratory unexplained different stale skipped", order, " ")
  for (i = 1; i <= n; i++)
    if (lists[order[i]] != "") printf "\n%s\n%s", title[order[i]], lists[order[i]]
  print "\nNot applicable:"
  for (i = 1; i <= entries; i++)
    printf "  %3d  %s: %s: %s\n", na[i], suiteOf[i], nameOf[i], used[i] ? reason[i] : reason[i] " (no test has such a name)"
  print bad ? "\nconformance: FAILED" : "\nconformance: no test that passes over TCP fails over RDMA"
  exit bad
}
