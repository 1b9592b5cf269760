//! Plots: ratio bars over all tests, and tokens per second against the depth of the KV cache. Each as PNG and SVG.

use std::fmt::Display;
use std::path::Path;
use std::sync::Once;

use anyhow::{Context, Result, anyhow};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::summary::{Ratio, Table};
use crate::files;

type Area<DB> = DrawingArea<DB, Shift>;
type Drawn<DB> = Result<(), DrawingAreaErrorKind<<DB as DrawingBackend>::ErrorType>>;

/// What can be drawn on any of plotters' backends.
trait Plot {
    /// Pixels across and down.
    fn size(&self) -> (u32, u32);
    fn draw<DB: DrawingBackend>(&self, area: &Area<DB>) -> Drawn<DB>;
}

const INK: RGBColor = RGBColor(40, 40, 40);
const GRID: RGBColor = RGBColor(215, 215, 215);

/// Colour of a program: stock is grey, HiNa blue. They differ in lightness too.
fn colour(program: usize) -> RGBColor {
    const OTHERS: [RGBColor; 3] = [RGBColor(235, 150, 50), RGBColor(60, 160, 100), RGBColor(150, 90, 170)];
    match program {
        0 => RGBColor(120, 120, 120),
        1 => RGBColor(30, 100, 180),
        other => OTHERS[(other - 2) % OTHERS.len()],
    }
}

/// Writes the plots of `tables` to `dir`; returns the names of the files without their endings.
///
/// # Errors
/// A sentence that names the plot or the file.
pub fn write_all(dir: &Path, tables: &[Table]) -> Result<Vec<String>> {
    let mut names = Vec::new();
    let ratios = Ratios::new(tables);
    if !ratios.bars.is_empty() {
        names.push("ratios".to_owned());
        write(dir, "ratios", &ratios)?;
    }
    for table in tables {
        let depths = Depths::new(table);
        if depths.lines.iter().any(|(_, points)| points.len() > 1) {
            let name = depth_name(&table.model);
            write(dir, &name, &depths)?;
            names.push(name);
        }
    }
    Ok(names)
}

/// Name of the plot of speed against depth of a model.
pub fn depth_name(model: &str) -> String {
    let safe = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' };
    format!("depth-{}", model.chars().map(safe).collect::<String>())
}

fn write(dir: &Path, name: &str, plot: &impl Plot) -> Result<()> {
    font_of_ours();
    let failed = |e: &dyn Display| anyhow!("the plot {name} could not be drawn: {e}");
    let size = plot.size();
    let mut svg = String::new();
    plot.draw(&SVGBackend::with_string(&mut svg, size).into_drawing_area()).map_err(|e| failed(&e))?;
    files::write(&dir.join(format!("{name}.svg")), svg)?;
    let mut rgb = vec![0; (size.0 * size.1 * 3) as usize];
    plot.draw(&BitMapBackend::with_buffer(&mut rgb, size).into_drawing_area()).map_err(|e| failed(&e))?;
    files::write(&dir.join(format!("{name}.png")), png(&rgb, size).context("a plot could not be packed as PNG")?)
}

fn png(rgb: &[u8], (width, height): (u32, u32)) -> Result<Vec<u8>> {
    let mut out = Vec::new();
    let mut encoder = png::Encoder::new(&mut out, width, height);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    encoder.write_header()?.write_image_data(rgb)?;
    Ok(out)
}

/// The font is part of this program, so that a machine without fonts draws the same plots.
fn font_of_ours() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        for style in [FontStyle::Normal, FontStyle::Bold] {
            let known = plotters::style::register_font("sans-serif", style, epaint_default_fonts::UBUNTU_LIGHT);
            debug_assert!(known.is_ok());
        }
    });
}

fn text(size: u32, h: HPos, v: VPos) -> TextStyle<'static> {
    ("sans-serif", size).into_font().color(&INK).pos(Pos::new(h, v))
}

/// A small coloured square and a name for each program, from `x` on.
fn legend<DB: DrawingBackend>(area: &Area<DB>, programs: &[String], from: usize, mut x: i32, y: i32) -> Drawn<DB> {
    let style = text(16, HPos::Left, VPos::Center);
    for (i, name) in programs.iter().enumerate().skip(from) {
        area.draw(&Rectangle::new([(x, y - 6), (x + 12, y + 6)], colour(i).filled()))?;
        area.draw_text(name, &style, (x + 18, y))?;
        x += 40 + area.estimate_text_size(name, &style)?.0 as i32;
    }
    Ok(())
}

/// A step of 1, 2 or 5 times a power of ten that cuts `max` in at most `parts`.
fn nice_step(max: f64, parts: f64) -> f64 {
    let power = 10f64.powf((max / parts).log10().floor());
    [1.0, 2.0, 5.0, 10.0].into_iter().map(|s| s * power).find(|s| max / s <= parts).unwrap_or(max)
}

/// Bars of the ratio to stock.
struct Ratios<'a> {
    programs: &'a [String],
    /// Label, program and ratio.
    bars: Vec<(String, usize, Ratio)>,
    max: f64,
}

impl<'a> Ratios<'a> {
    const LEFT: i32 = 300;
    const TOP: i32 = 70;
    const ROW: i32 = 24;

    fn new(tables: &'a [Table]) -> Self {
        let mut bars = Vec::new();
        for (table, row) in tables.iter().flat_map(|t| t.rows.iter().map(move |r| (t, r))) {
            let label = format!("{} {}", table.model, row.case);
            let ratio =
                |(i, c): (usize, &Option<_>)| Some((i, c.as_ref().and_then(|c: &super::summary::Cell| c.ratio)?));
            bars.extend(row.cells.iter().enumerate().filter_map(ratio).map(|(i, r)| (label.clone(), i, r)));
        }
        // A round that went wild is cut off, so that the bars stay readable.
        let max = bars.iter().map(|b| b.2.high.min(1.3 * b.2.mean)).fold(1.2, f64::max);
        Self { programs: tables.first().map_or(&[], |t| &t.programs), bars, max }
    }

    fn x(&self, ratio: f64) -> i32 {
        let right = self.size().0 as i32 - 80;
        Self::LEFT + (ratio.min(self.max) / self.max * f64::from(right - Self::LEFT)).round() as i32
    }
}

impl Plot for Ratios<'_> {
    fn size(&self) -> (u32, u32) {
        (960, (Self::TOP + Self::ROW * self.bars.len() as i32 + 50) as u32)
    }

    fn draw<DB: DrawingBackend>(&self, area: &Area<DB>) -> Drawn<DB> {
        area.fill(&WHITE)?;
        let bottom = Self::TOP + Self::ROW * self.bars.len() as i32;
        area.draw_text("tokens/s, ratio to stock", &text(22, HPos::Left, VPos::Center), (20, 24))?;
        legend(area, self.programs, 1, Self::LEFT, 52)?;
        let step = nice_step(self.max, 8.0);
        for i in 0..=(self.max / step) as i32 {
            let x = self.x(f64::from(i) * step);
            area.draw(&PathElement::new([(x, Self::TOP), (x, bottom)], GRID))?;
            let label = format!("{:.*}", usize::from(step < 1.0), f64::from(i) * step);
            area.draw_text(&label, &text(15, HPos::Center, VPos::Top), (x, bottom + 6))?;
        }
        let mut last = "";
        for (i, (label, program, ratio)) in self.bars.iter().enumerate() {
            let y = Self::TOP + Self::ROW * i as i32 + Self::ROW / 2;
            if label != last {
                area.draw_text(label, &text(16, HPos::Right, VPos::Center), (Self::LEFT - 10, y))?;
                last = label;
            }
            let box_of = [(self.x(0.0), y - 8), (self.x(ratio.mean), y + 8)];
            area.draw(&Rectangle::new(box_of, colour(*program).filled()))?;
            area.draw(&PathElement::new([(self.x(ratio.low), y), (self.x(ratio.high), y)], INK.stroke_width(2)))?;
            let value = format!("{:.2}x", ratio.mean);
            area.draw_text(&value, &text(16, HPos::Left, VPos::Center), (self.x(ratio.high) + 8, y))?;
        }
        area.draw(&PathElement::new([(self.x(1.0), Self::TOP - 4), (self.x(1.0), bottom)], INK.stroke_width(2)))?;
        area.draw_text("stock", &text(15, HPos::Center, VPos::Top), (self.x(1.0), bottom + 24))?;
        area.present()
    }
}

/// Tokens per second of generation by depth, a line for each program.
struct Depths<'a> {
    table: &'a Table,
    /// Program, and (depth, tokens per second) ascending.
    lines: Vec<(usize, Vec<(f64, f64)>)>,
}

impl<'a> Depths<'a> {
    fn new(table: &'a Table) -> Self {
        let points = |program: usize| {
            let at = |row: &super::summary::Row| {
                Some((f64::from(row.case.generation_depth()?), row.cells[program].as_ref()?.speed))
            };
            let mut points: Vec<(f64, f64)> = table.rows.iter().filter_map(at).collect();
            points.sort_by(|a, b| a.0.total_cmp(&b.0));
            points
        };
        Self { table, lines: (0..table.programs.len()).map(|p| (p, points(p))).collect() }
    }
}

impl Plot for Depths<'_> {
    fn size(&self) -> (u32, u32) {
        (960, 480)
    }

    fn draw<DB: DrawingBackend>(&self, area: &Area<DB>) -> Drawn<DB> {
        area.fill(&WHITE)?;
        let all = || self.lines.iter().flat_map(|(_, points)| points);
        let (deepest, fastest) = all().fold((1.0f64, 0.0f64), |(d, s), p| (d.max(p.0), s.max(p.1)));
        let title = format!("{}: tokens/s of generation", self.table.model);
        area.draw_text(&title, &text(22, HPos::Left, VPos::Center), (20, 24))?;
        legend(area, &self.table.programs, 0, 80, 52)?;
        let mut chart = ChartBuilder::on(area)
            .margin_top(70)
            .margin_right(30)
            .margin_bottom(6)
            .x_label_area_size(50)
            .y_label_area_size(70)
            .build_cartesian_2d(0.0..deepest * 1.02, 0.0..fastest * 1.1)?;
        let labels = text(15, HPos::Center, VPos::Center);
        chart
            .configure_mesh()
            .x_desc("tokens in the KV cache")
            .label_style(("sans-serif", 15).into_font().color(&INK))
            .axis_desc_style(labels)
            .x_label_formatter(&|x| format!("{x:.0}"))
            .y_label_formatter(&|y| format!("{y:.0}"))
            .bold_line_style(GRID)
            .light_line_style(TRANSPARENT)
            .axis_style(INK)
            .draw()?;
        for (program, points) in &self.lines {
            let ink = colour(*program);
            chart.draw_series(LineSeries::new(points.iter().copied(), ink.stroke_width(2)))?;
            chart.draw_series(points.iter().map(|&p| Circle::new(p, 4, ink.filled())))?;
        }
        area.present()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::session::tests::{run, session};
    use crate::compare::summary::tables;

    #[test]
    fn both_plots_in_both_forms_with_text_on_them() {
        let dir = std::env::temp_dir().join(format!("hina-compare-plots-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let mut s = session(&["pp8", "tg4", "tg4@d64"], 1);
        for step in s.steps() {
            s.runs.push(run(step, &[100.0 + 40.0 * step.program as f64]));
        }
        let names = write_all(&dir, &tables(&s)).unwrap();
        assert_eq!(names, ["ratios", "depth-tiny"]);
        for name in names {
            let svg = std::fs::read_to_string(dir.join(format!("{name}.svg"))).unwrap();
            assert!(svg.contains("HiNa") && svg.trim_end().ends_with("</svg>"));
            let file = std::fs::File::open(dir.join(format!("{name}.png"))).unwrap();
            let mut reader = png::Decoder::new(std::io::BufReader::new(file)).read_info().unwrap();
            let mut rgb = vec![0; reader.output_buffer_size().unwrap()];
            reader.next_frame(&mut rgb).unwrap();
            // The title's letters: dark pixels in the first 40 rows, which hold nothing else.
            let dark = rgb[..960 * 3 * 40].chunks(3).filter(|p| p.iter().all(|&c| c < 120)).count();
            assert!(dark > 100, "{name}: {dark}");
        }
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn nothing_measured_draws_nothing() {
        assert!(write_all(Path::new("/nonexistent"), &tables(&session(&["pp8"], 1))).unwrap().is_empty());
    }

    #[test]
    fn steps_and_names() {
        assert_eq!([nice_step(2.3, 8.0), nice_step(7.9, 8.0), nice_step(90.0, 8.0)], [0.5, 1.0, 20.0]);
        assert_eq!(depth_name("a b/c-1.5"), "depth-a_b_c-1.5");
    }
}
