package main

import (
	"os"
	"path/filepath"
	"testing"
)

func TestParsePerftest(t *testing.T) {
	// What perftest 4.5 prints, shortened.
	const latency = ` #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]   99% percentile[usec]   99.9% percentile[usec] 
 64      5000          12.19          751.90       12.73    	       14.82       	15.04  		52.60   		302.90 
---------------------------------------------------------------------------------------
`
	const bandwidth = `---------------------------------------------------------------------------------------
 #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]
 65536      1500             69.60              68.32  		   0.001093
`
	for _, test := range []struct {
		out  string
		want map[string]float64
	}{
		{latency, map[string]float64{"t_typical[usec]": 12.73, "99% percentile[usec]": 52.6, "99.9% percentile[usec]": 302.9, "#bytes": 64}},
		{bandwidth, map[string]float64{"BW average[MB/sec]": 68.32, "#iterations": 1500}},
	} {
		got, err := parsePerftest(test.out)
		if err != nil {
			t.Fatal(err)
		}
		for name, v := range test.want {
			if got[name] != v {
				t.Errorf("%s is %v, want %v", name, got[name], v)
			}
		}
	}
	for _, out := range []string{"", "Couldn't connect\n", " #bytes #iterations\n 64\n", " #bytes #iterations\n 64 x\n"} {
		if _, err := parsePerftest(out); err == nil {
			t.Errorf("no error for %q", out)
		}
	}
}

func TestListensIn(t *testing.T) {
	const tcp = `  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 013F12C6:18EB 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1 0 100 0 0 10 0
   1: 013F12C6:4011 013F12C6:18EB 01 00000000:00000000 00:00000000 00000000     0        0 2 1 0 100 0 0 10 0
`
	for port, want := range map[int]bool{0x18eb: true, 0x4011: false, 80: false} {
		if got := listensIn(tcp, port); got != want {
			t.Errorf("port %d: %v", port, got)
		}
	}
}

func TestGIDIndex(t *testing.T) {
	dir := t.TempDir()
	for name, content := range map[string]string{
		"ports/1/gids/0":            "fe80:0000:0000:0000:3c6a:16ff:fed3:4691\n",
		"ports/1/gids/1":            "0000:0000:0000:0000:0000:ffff:c612:3f01\n",
		"ports/1/gids/2":            "0000:0000:0000:0000:0000:ffff:c612:3f01\n",
		"ports/1/gids/3":            "2001:0db8:0063:0000:0000:0000:0000:0001\n",
		"ports/1/gid_attrs/types/1": "IB/RoCE v1\n",
		"ports/1/gid_attrs/types/2": "RoCE v2\n",
		"ports/1/gid_attrs/types/3": "RoCE v2\n",
	} {
		name = filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(name), 0o777); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(content), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	for addr, want := range map[string]int{"198.18.63.1": 2, "2001:db8:63::1": 3} {
		if got, err := gidIndex(dir, addr); err != nil || got != want {
			t.Errorf("%s: %d, %v, want %d", addr, got, err, want)
		}
	}
	if _, err := gidIndex(dir, "192.0.2.1"); err == nil {
		t.Error("an address that the device does not have: no error")
	}
}
