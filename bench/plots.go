package main

import (
	"cmp"
	"fmt"
	"image/color"
	"math"
	"math/bits"
	"os"
	"path/filepath"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgimg"
	"gonum.org/v1/plot/vg/vgsvg"
)

// Colours that people with any kind of colour vision tell apart (Okabe and Ito).
var (
	blue   = color.RGBA{0x00, 0x72, 0xb2, 0xff}
	orange = color.RGBA{0xe6, 0x9f, 0x00, 0xff}
	green  = color.RGBA{0x00, 0x9e, 0x73, 0xff}
	red    = color.RGBA{0xd5, 0x5e, 0x00, 0xff}
	purple = color.RGBA{0xcc, 0x79, 0xa7, 0xff}
	sky    = color.RGBA{0x56, 0xb4, 0xe9, 0xff}
	black  = color.RGBA{0x30, 0x30, 0x30, 0xff}
	grid   = color.RGBA{0xe4, 0xe4, 0xe4, 0xff}
)

// A series is a line of a plot, and its entry in the legend.
type series struct {
	label  string
	color  color.Color
	dashed bool
	shape  draw.GlyphDrawer
}

var peerSeries = map[string]series{
	goTCP:    {"valkey-go, TCP", orange, true, draw.TriangleGlyph{}},
	goRDMA:   {"valkey-go, RDMA", blue, false, draw.CircleGlyph{}},
	rawTCP:   {"raw, TCP", red, true, draw.TriangleGlyph{}},
	rawRDMA:  {"raw, RDMA", sky, false, draw.CircleGlyph{}},
	cTCP:     {"C client, TCP", purple, true, draw.TriangleGlyph{}},
	cRDMA:    {"C client, RDMA", green, false, draw.SquareGlyph{}},
	writeBW:  {"ib_write_bw: the limit", black, true, draw.CrossGlyph{}},
	rawOut:   {"raw, to the server", purple, false, draw.CircleGlyph{}},
	rawIn:    {"raw, from the server", red, false, draw.SquareGlyph{}},
	edgeReal: {"Valkey", purple, false, draw.SquareGlyph{}},
}

// A drawing is some panels in rows below a title, with one legend to their right.
type drawing struct {
	title    []string // lines
	panels   [][]panel
	legend   []series
	w, h     vg.Length
	legendAt vg.Length // width of the legend; 0 means the usual
}

func init() {
	plot.DefaultFont = font.Font{Typeface: "Liberation", Variant: "Sans"}
}

// A panel has its axes labelled by the drawing: with a logarithmic axis, plot reserves room for a label in the wrong place.
type panel struct {
	*plot.Plot
	x, y string
	from float64 // what has a smaller X is left out
}

func newPanel(title, x, y string) panel {
	p := plot.New()
	p.Title.Text = title
	p.Title.TextStyle.Font.Size = 11
	p.Title.Padding = 6
	for _, a := range []*plot.Axis{&p.X, &p.Y} {
		a.Tick.Label.Font.Size = 9
		a.Padding = 4
	}
	g := plotter.NewGrid()
	g.Vertical.Color, g.Horizontal.Color = grid, grid
	p.Add(g)
	return panel{p, x, y, 0}
}

func (p panel) draw(c draw.Canvas) {
	const room = vg.Length(18)
	p.Plot.Draw(draw.Crop(c, room, 0, room, 0))
	words := text.Style{Color: color.Black, Font: font.From(plot.DefaultFont, 10), Handler: plot.DefaultTextHandler,
		XAlign: draw.XCenter, YAlign: draw.YBottom}
	c.FillText(words, vg.Point{X: c.Center().X + room, Y: c.Min.Y}, p.x)
	words.Rotation, words.YAlign = math.Pi/2, draw.YTop
	c.FillText(words, vg.Point{X: c.Min.X, Y: c.Center().Y + room/2}, p.y)
}

// add draws a series into a panel. NaNs are left out, and what the panel leaves out.
func (s series) add(p panel, xys plotter.XYs) error {
	var points plotter.XYs
	for _, xy := range xys {
		if !math.IsNaN(xy.Y) && xy.Y > 0 && xy.X >= p.from {
			points = append(points, xy)
		}
	}
	if len(points) == 0 {
		return nil
	}
	l, sc, err := plotter.NewLinePoints(points)
	if err != nil {
		return err
	}
	l.LineStyle, sc.GlyphStyle = s.line(), s.glyph()
	p.Add(l, sc)
	return nil
}

func (s series) line() draw.LineStyle {
	l := draw.LineStyle{Color: s.color, Width: 1.4}
	if s.dashed {
		l.Dashes = []vg.Length{5, 3}
	}
	return l
}

func (s series) glyph() draw.GlyphStyle {
	return draw.GlyphStyle{Color: s.color, Radius: 2.8, Shape: s.shape}
}

// save writes the drawing as PNG and as SVG.
func (d *drawing) save(dir, name string) error {
	png := vgimg.NewWith(vgimg.UseWH(d.w, d.h), vgimg.UseDPI(144))
	svg := vgsvg.New(d.w, d.h)
	d.draw(draw.New(png))
	d.draw(draw.New(svg))
	write := func(ext string, f func(*os.File) error) error {
		file, err := os.Create(filepath.Join(dir, name+ext))
		if err != nil {
			return err
		}
		err = f(file)
		if err2 := file.Close(); err == nil {
			err = err2
		}
		return err
	}
	if err := write(".png", func(f *os.File) error { _, err := vgimg.PngCanvas{Canvas: png}.WriteTo(f); return err }); err != nil {
		return err
	}
	return write(".svg", func(f *os.File) error { _, err := svg.WriteTo(f); return err })
}

func (d *drawing) draw(c draw.Canvas) {
	const margin, lineHeight = vg.Length(10), vg.Length(17)
	c.SetColor(color.White)
	c.Fill(c.Rectangle.Path())
	words := text.Style{Color: color.Black, Font: font.From(plot.DefaultFont, 13), Handler: plot.DefaultTextHandler,
		XAlign: draw.XLeft, YAlign: draw.YTop}
	y := c.Max.Y - margin
	for i, line := range d.title {
		if i > 0 {
			words.Font.Size = 10.5
		}
		c.FillText(words, vg.Point{X: c.Min.X + margin, Y: y}, line)
		y -= lineHeight
	}
	width := cmp.Or(d.legendAt, 150)
	body := draw.Crop(c, margin, -margin-width, margin, y-6-c.Max.Y)
	tiles := draw.Tiles{Rows: len(d.panels), Cols: len(d.panels[0]), PadX: 14, PadY: 20}
	for i, line := range d.panels {
		for j, p := range line {
			p.draw(tiles.At(body, j, i))
		}
	}
	words.Font.Size = 10
	words.YAlign = draw.YCenter
	at := vg.Point{X: c.Max.X - width, Y: y - 26}
	for _, s := range d.legend {
		c.StrokeLine2(s.line(), at.X, at.Y, at.X+26, at.Y)
		c.DrawGlyph(s.glyph(), vg.Point{X: at.X + 13, Y: at.Y})
		c.FillText(words, vg.Point{X: at.X + 32, Y: at.Y}, s.label)
		at.Y -= lineHeight
	}
}

// Axes.

// sizeTicks are ticks at sizes in bytes, labelled for a narrow axis: 1K is 1024.
type sizeTicks struct{}

func (sizeTicks) Ticks(lo, hi float64) []plot.Tick {
	var t []plot.Tick
	for size := 16; size <= 16<<20; size *= 4 {
		if v := float64(size); v >= lo*0.999 && v <= hi*1.001 {
			label := strings.TrimSuffix(strings.TrimSuffix(bytesName(size), "iB"), "B")
			if hi/lo > 1e4 && bits.TrailingZeros(uint(size))%4 != 0 {
				label = "" // there would be too many
			}
			t = append(t, plot.Tick{Value: v, Label: label})
		}
	}
	return t
}

// spaced puts a space before a unit.
func spaced(s string) string {
	i := strings.IndexFunc(s, func(r rune) bool { return r > '9' })
	return s[:i] + " " + s[i:]
}

// decades are ticks at the powers of ten, labelled, and at what is between them.
type decades struct{ label func(float64) string }

func (d decades) Ticks(lo, hi float64) []plot.Tick {
	var t []plot.Tick
	for e := math.Floor(math.Log10(lo)); e <= math.Ceil(math.Log10(hi)); e++ {
		for m := 1.0; m < 10; m++ {
			v := m * math.Pow(10, e)
			if v < lo*0.999 || v > hi*1.001 {
				continue
			}
			tick := plot.Tick{Value: v}
			if m == 1 || hi/lo < 50 && (m == 2 || m == 5) {
				tick.Label = d.label(v)
			}
			t = append(t, tick)
		}
	}
	return t
}

func timeLabel(ns float64) string {
	switch {
	case ns >= 0.999e9:
		return fmt.Sprintf("%.3g s", ns/1e9)
	case ns >= 0.999e6:
		return fmt.Sprintf("%.3g ms", ns/1e6)
	}
	return fmt.Sprintf("%.3g µs", ns/1e3)
}

// logarithmic makes an axis one, with the range widened to whole steps of its ticks.
func logarithmic(a *plot.Axis, ticks plot.Ticker) {
	a.Scale = plot.LogScale{}
	a.Tick.Marker = ticks
}

// widen makes the range of all panels' Y axes that of all their data, rounded up and down to 1, 2 or 5.
func widen(panels ...panel) {
	lo, hi := math.Inf(1), math.Inf(-1)
	for _, p := range panels {
		if p.Y.Min > 0 && !math.IsInf(p.Y.Min, 0) {
			lo, hi = min(lo, p.Y.Min), max(hi, p.Y.Max)
		}
	}
	if math.IsInf(lo, 0) {
		lo, hi = 1, 10
	}
	round := func(v float64, up bool) float64 {
		e := math.Pow(10, math.Floor(math.Log10(v)))
		steps := []float64{1, 2, 5, 10}
		best := e
		for _, s := range steps {
			if up && s*e >= v*0.999 {
				return s * e
			}
			if !up && s*e <= v*1.001 {
				best = s * e
			}
		}
		return best
	}
	for _, p := range panels {
		p.Y.Min, p.Y.Max = round(lo, false), round(hi, true)
	}
}

// The plots.

// overRounds is the median over the rounds; NaN if there is none.
func overRounds(rows []row, name string, figure func(*row) float64) float64 {
	var v []float64
	for _, x := range byRound(rows, name, figure) {
		v = append(v, x)
	}
	return median(v)
}

// bySize is the median over the rounds of a figure of what is measured for sizes, by size.
func bySize(rows []row, r row, figure func(*row) float64) plotter.XYs {
	var xys plotter.XYs
	for _, size := range []int{16, 64, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 1 << 20, 16 << 20} {
		r.Size = size
		if v := overRounds(rows, r.name(), figure); !math.IsNaN(v) {
			xys = append(xys, plotter.XY{X: float64(size), Y: v})
		}
	}
	return xys
}

// makePlots draws what rows have something for.
func makePlots(dir string, environment [][2]string, rows []row) error {
	if err := os.MkdirAll(dir, 0o777); err != nil {
		return err
	}
	where := ""
	for _, e := range environment {
		if e[0] == "lab" {
			where = e[1]
		}
	}
	for _, f := range []struct {
		name string
		make func([]row) (*drawing, error)
	}{{"latency", latencyPlot}, {"throughput", throughputPlot}, {"window-edges", edgePlot}} {
		d, err := f.make(rows)
		if err != nil {
			return fmt.Errorf("plot %s: %w", f.name, err)
		}
		if d == nil {
			continue
		}
		d.title = append(d.title, where)
		if err := d.save(dir, f.name); err != nil {
			return err
		}
	}
	return nil
}

// latencyPlot is the percentiles of GET and SET by size.
func latencyPlot(rows []row) (*drawing, error) {
	peers := []string{goTCP, goRDMA, rawRDMA, cRDMA}
	d := &drawing{w: 11 * vg.Inch, h: 7 * vg.Inch}
	var all []panel
	points := 0
	for _, workload := range []string{"get", "set"} {
		var line []panel
		for _, f := range []struct {
			name   string
			figure func(*row) float64
		}{{"median", p50}, {"99th percentile", func(r *row) float64 { return r.P99 }}, {"99.9th percentile", func(r *row) float64 { return r.P999 }}} {
			p := newPanel(strings.ToUpper(workload)+", "+f.name, "size of the value (bytes)", "time")
			for _, peer := range peers {
				xys := bySize(rows, row{Workload: workload, Callers: 1, Peer: peer}, f.figure)
				points += len(xys)
				if err := peerSeries[peer].add(p, xys); err != nil {
					return nil, err
				}
			}
			p.X.Min, p.X.Max = 16, 16<<20
			logarithmic(&p.X, sizeTicks{})
			logarithmic(&p.Y, decades{timeLabel})
			line = append(line, p)
			all = append(all, p)
		}
		d.panels = append(d.panels, line)
	}
	if points < 4 {
		return nil, nil
	}
	widen(all...)
	for _, peer := range peers {
		d.legend = append(d.legend, peerSeries[peer])
	}
	ratio := func(workload string) float64 {
		name := row{Workload: workload, Size: 64, Callers: 1}
		return spreadOf(ratios(byRound(rows, name.caseName()+"/peer="+goRDMA, p50), byRound(rows, name.caseName()+"/peer="+goTCP, p50))).Median
	}
	d.title = []string{
		fmt.Sprintf("Latency by size, one caller: for 64 B, valkey-go over RDMA needs %.2f (GET) and %.2f (SET) of its time over TCP", ratio("get"), ratio("set")),
		"Medians over the rounds. The C client takes the time of a GET when its first bytes come: above 4 KiB that is not shown.",
	}
	return d, nil
}

// throughputPlot is bytes a second by size, streams and values, against the limit.
func throughputPlot(rows []row) (*drawing, error) {
	bytes := func(r *row) float64 { return r.BytesPS / 1e6 }
	d := &drawing{w: 11 * vg.Inch, h: 4.6 * vg.Inch, legendAt: 165}
	streams := newPanel("Streams to and from the lean server", "size of the messages (bytes)", "MB/s")
	limit := bySize(rows, row{Workload: "stream", Peer: writeBW}, bytes)
	reached := make(map[string]float64)
	points := 0
	for _, peer := range []string{writeBW, rawOut, rawIn} {
		xys := bySize(rows, row{Workload: "stream", Peer: peer}, bytes)
		points += len(xys)
		if err := peerSeries[peer].add(streams, xys); err != nil {
			return nil, err
		}
		d.legend = append(d.legend, peerSeries[peer])
		name := row{Workload: "stream", Size: 64 << 10, Peer: peer}
		limitName := row{Workload: "stream", Size: 64 << 10, Peer: writeBW}
		reached[peer] = 100 * spreadOf(ratios(byRound(rows, name.name(), bytes), byRound(rows, limitName.name(), bytes))).Median
	}
	panels := []panel{streams}
	for _, workload := range []string{"get", "set"} {
		p := newPanel(strings.ToUpper(workload)+", one caller", "size of the value (bytes)", "MB/s")
		p.from = 1 << 10
		if err := peerSeries[writeBW].add(p, limit); err != nil {
			return nil, err
		}
		for _, peer := range []string{goTCP, goRDMA, rawRDMA, cRDMA} {
			xys := bySize(rows, row{Workload: workload, Callers: 1, Peer: peer}, bytes)
			points += len(xys)
			if err := peerSeries[peer].add(p, xys); err != nil {
				return nil, err
			}
			if workload == "get" {
				d.legend = append(d.legend, peerSeries[peer])
			}
		}
		panels = append(panels, p)
	}
	if points < 4 {
		return nil, nil
	}
	most := 0.0
	for _, p := range panels {
		most = max(most, p.Y.Max)
	}
	for i, p := range panels {
		p.X.Min, p.X.Max = 1<<10, 16<<20
		if i == 0 {
			p.X.Min, p.X.Max = 64, 1<<20
		}
		logarithmic(&p.X, sizeTicks{})
		p.Y.Min, p.Y.Max = 0, most*1.05
	}
	d.panels = [][]panel{panels}
	d.title = []string{
		fmt.Sprintf("Throughput by size: at 64 KiB, streams reach %.0f %% (to the server) and %.0f %% (from it) of ib_write_bw",
			reached[rawOut], reached[rawIn]),
		"Medians over the rounds; MB are millions of bytes.",
	}
	return d, nil
}

// edgePlot is the latency of operations that cross a window edge beside that of others.
func edgePlot(rows []row) (*drawing, error) {
	type variant struct {
		color   color.Color
		peer    string
		buffers int
	}
	classes := []struct {
		name, label string
		shape       draw.GlyphDrawer
	}{
		{elsewhere, "across none", draw.CircleGlyph{}},
		{laterEdge, "operation across a window edge", draw.PyramidGlyph{}},
		{firstEdge, "across the first edge", draw.BoxGlyph{}},
	}
	d := &drawing{w: 11 * vg.Inch, h: 5 * vg.Inch, legendAt: 190}
	var panels []panel
	windows := []int{64 << 10, 1 << 20, 16 << 20}
	size := edgeSizes[1]
	change := make(map[string][]float64)
	points := 0
	for _, direction := range []struct {
		workload, title string
		kinds           []variant
	}{
		{"edge-out", "To the server: its receive window", []variant{
			{blue, rawRDMA, 1}, {green, rawRDMA, 2}, {red, edgeReal, 1}}},
		{"edge-in", "From the server: our receive window", []variant{
			{blue, rawRDMA, 1}, {green, rawRDMA, 2}, {purple, edgeReal, 2}}},
	} {
		p := newPanel(direction.title, "size of the window", fmt.Sprintf("time for an operation of %d bytes", size))
		for w, window := range windows {
			for k, kind := range direction.kinds {
				for i, class := range classes {
					r := row{Workload: direction.workload, Size: size, Window: window, Buffers: kind.buffers, Class: class.name, Peer: kind.peer}
					mid, high := overRounds(rows, r.name(), p50), overRounds(rows, r.name(), func(r *row) float64 { return r.P99 })
					if math.IsNaN(mid) {
						continue
					}
					points++
					x := float64(w) + (float64(k)-1)*0.29 + (float64(i)-1)*0.08
					bar, err := plotter.NewLine(plotter.XYs{{X: x, Y: mid}, {X: x, Y: max(high, mid)}})
					if err != nil {
						return nil, err
					}
					bar.LineStyle = draw.LineStyle{Color: kind.color, Width: 1.4}
					dot, err := plotter.NewScatter(plotter.XYs{{X: x, Y: mid}})
					if err != nil {
						return nil, err
					}
					dot.GlyphStyle = draw.GlyphStyle{Color: kind.color, Radius: 3.6, Shape: class.shape}
					top, err := plotter.NewScatter(plotter.XYs{{X: x, Y: max(high, mid)}})
					if err != nil {
						return nil, err
					}
					top.GlyphStyle = draw.GlyphStyle{Color: kind.color, Radius: 2, Shape: draw.PlusGlyph{}}
					p.Add(bar, dot, top)
				}
				edge := row{Workload: direction.workload, Size: size, Window: window, Buffers: kind.buffers, Class: laterEdge, Peer: kind.peer}
				other := edge
				other.Class = elsewhere
				change[direction.workload] = append(change[direction.workload], ratios(byRound(rows, edge.name(), p50), byRound(rows, other.name(), p50))...)
			}
		}
		p.X.Min, p.X.Max = -0.5, float64(len(windows))-0.5
		var ticks []plot.Tick
		for w, window := range windows {
			ticks = append(ticks, plot.Tick{Value: float64(w), Label: spaced(bytesName(window))})
		}
		p.X.Tick.Marker = plot.ConstantTicks(ticks)
		logarithmic(&p.Y, decades{timeLabel})
		panels = append(panels, p)
	}
	if points < 4 {
		return nil, nil
	}
	widen(panels...)
	d.panels = [][]panel{panels}
	d.legend = []series{
		{"1 receive buffer, lean server", blue, false, draw.CircleGlyph{}},
		{"2 receive buffers, lean server", green, false, draw.CircleGlyph{}},
		{"1 receive buffer, Valkey", red, false, draw.CircleGlyph{}},
		{"2 receive buffers, Valkey", purple, false, draw.CircleGlyph{}},
	}
	for _, class := range []int{1, 2, 0} {
		d.legend = append(d.legend, series{classes[class].label, black, false, classes[class].shape})
	}
	d.title = []string{
		fmt.Sprintf("Operations that cross a window edge: their median is %.2f times that of others to the server, %.2f times from it",
			median(change["edge-out"]), median(change["edge-in"])),
		"Medians over the rounds of each round's median (symbol) and 99th percentile (end of the bar).",
	}
	return d, nil
}
