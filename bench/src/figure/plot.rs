//! Line plots as SVG: they need no font and no image library to build, and a browser draws them sharp at any size.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use plotters::coord::Shift;
use plotters::coord::ranged1d::{AsRangedCoord, ValueFormatter};
use plotters::prelude::*;

/// Of one plot; several are drawn side by side, two in a row.
const WIDTH: u32 = 960;
const HEIGHT: u32 = 500;
/// On the right of each plot: the names of its lines.
const LEGEND_WIDTH: u32 = 180;
/// The first name stands so far down, and the others so far below each other.
const LEGEND_TOP: i32 = 60;
const LEGEND_STEP: i32 = 24;
/// Colours that differ also for those who cannot tell red from green (Okabe and Ito).
const COLOURS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(0, 0, 0),
];

/// How x is spread over its axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scale {
    Linear,
    /// For what is varied by powers of two.
    Logarithmic,
}

/// A plot of lines. Without `y_max`, y goes from zero to what it needs; with it, from the lowest point to `y_max`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Plot {
    pub(crate) title: String,
    pub(crate) x_label: String,
    pub(crate) x_scale: Scale,
    pub(crate) y_label: String,
    pub(crate) lines: Vec<Line>,
    pub(crate) y_max: Option<f64>,
}

/// One line, with a mark at each point.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Line {
    pub(crate) name: String,
    /// By rising x; all above zero on a logarithmic axis.
    pub(crate) points: Vec<(f64, f64)>,
}

impl Line {
    /// Points by the name of their line, each line's by their x; lines in the order of their first points.
    pub(crate) fn by_name(points: impl IntoIterator<Item = (String, f64, f64)>) -> Vec<Self> {
        let mut lines: Vec<Self> = Vec::new();
        for (name, x, y) in points {
            match lines.iter_mut().find(|line| line.name == name) {
                Some(line) => line.points.push((x, y)),
                None => lines.push(Self { name, points: vec![(x, y)] }),
            }
        }
        lines.iter_mut().for_each(|line| line.points.sort_by(|a, b| a.0.total_cmp(&b.0)));
        lines
    }
}

/// Where a plot goes: a file in a folder, which is made if it is not there.
pub(crate) fn path(folder: &Path, file: &str) -> anyhow::Result<PathBuf> {
    fs::create_dir_all(folder).with_context(|| format!("cannot make the folder {}", folder.display()))?;
    Ok(folder.join(file))
}

/// Writes plots to one SVG file.
pub(crate) fn write_svg(plots: &[Plot], path: &Path) -> anyhow::Result<()> {
    let columns = plots.len().clamp(1, 2);
    let rows = plots.len().div_ceil(columns).max(1);
    let draw = || {
        let area = SVGBackend::new(path, (WIDTH * columns as u32, HEIGHT * rows as u32)).into_drawing_area();
        area.fill(&WHITE)?;
        for (plot, part) in plots.iter().zip(area.split_evenly((rows, columns))) {
            plot.draw(&part)?;
        }
        area.present()?;
        anyhow::Ok(())
    };
    draw().with_context(|| format!("cannot write {}", path.display()))
}

impl Plot {
    fn draw<B: DrawingBackend>(&self, area: &DrawingArea<B, Shift>) -> anyhow::Result<()>
    where
        B::ErrorType: 'static,
    {
        let points = || self.lines.iter().flat_map(|line| &line.points);
        ensure!(points().next().is_some(), "the plot `{}` has no points", self.title);
        ensure!(points().all(|(x, y)| x.is_finite() && y.is_finite()), "a point of `{}` is nowhere", self.title);
        let x_min = points().map(|point| point.0).fold(f64::INFINITY, f64::min);
        let x_max = points().map(|point| point.0).fold(f64::NEG_INFINITY, f64::max);
        let (y_min, y_max) = match self.y_max {
            None => (0.0, points().map(|point| point.1).fold(0.0, f64::max).max(f64::MIN_POSITIVE) * 1.05),
            Some(y_max) => {
                let least = points().map(|point| point.1).fold(y_max, f64::min);
                let room = (y_max - least).max(y_max.abs() * 1e-3).max(f64::MIN_POSITIVE) * 0.05;
                (least - room, y_max + room)
            }
        };
        // A little room at both ends, so that the marks are not cut.
        match self.x_scale {
            Scale::Linear => {
                let room = (x_max - x_min).max(f64::MIN_POSITIVE) * 0.01;
                self.draw_over(x_min - room..x_max + room, y_min..y_max, area)
            }
            Scale::Logarithmic => {
                ensure!(x_min > 0.0, "a logarithmic axis has no place for {x_min}");
                self.draw_over((x_min / 1.1..x_max * 1.1).log_scale().base(2.0), y_min..y_max, area)
            }
        }
    }

    fn draw_over<B: DrawingBackend, X: AsRangedCoord<Value = f64>>(
        &self,
        x_axis: X,
        y_axis: Range<f64>,
        area: &DrawingArea<B, Shift>,
    ) -> anyhow::Result<()>
    where
        B::ErrorType: 'static,
        X::CoordDescType: ValueFormatter<f64>,
    {
        let (area, legend) = area.split_horizontally(area.dim_in_pixel().0 - LEGEND_WIDTH);
        let mut chart = ChartBuilder::on(&area)
            .caption(&self.title, ("sans-serif", 20))
            .margin(16)
            .x_label_area_size(48)
            .y_label_area_size(64)
            .build_cartesian_2d(x_axis, y_axis)?;
        chart
            .configure_mesh()
            .x_desc(&self.x_label)
            .y_desc(&self.y_label)
            .x_label_formatter(&|x| format!("{}", (x * 1000.0).round() / 1000.0))
            .axis_desc_style(("sans-serif", 16))
            .label_style(("sans-serif", 14))
            .light_line_style(TRANSPARENT)
            .bold_line_style(RGBColor(224, 224, 224))
            .draw()?;
        for (number, (line, colour)) in (0i32..).zip(self.lines.iter().zip(COLOURS.iter().cycle())) {
            let stroke = ShapeStyle::from(colour).stroke_width(2);
            chart.draw_series(LineSeries::new(line.points.iter().copied(), stroke))?;
            chart.draw_series(line.points.iter().map(|point| Circle::new(*point, 3, colour.filled())))?;
            let y = LEGEND_TOP + LEGEND_STEP * number;
            legend.draw(&PathElement::new([(4, y), (24, y)], stroke))?;
            legend.draw(&Circle::new((14, y), 3, colour.filled()))?;
            legend.draw(&Text::new(line.name.clone(), (32, y - 7), ("sans-serif", 14)))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plot(points: Vec<(f64, f64)>) -> Plot {
        Plot {
            title: "Reads & cache".into(),
            x_label: "cache, percent".into(),
            x_scale: Scale::Logarithmic,
            y_label: "reads".into(),
            lines: vec![Line { name: "optimum".into(), points }],
            y_max: None,
        }
    }

    #[test]
    fn a_plot_is_an_svg_with_its_words() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("plot.svg");
        let falling = plot(vec![(0.5, 3.0), (8.0, 0.5), (64.0, 0.0)]);
        let rising = Plot { title: "Hits".into(), y_max: Some(1.0), ..plot(vec![(0.5, 0.9), (64.0, 1.0)]) };
        let timed = Plot { x_scale: Scale::Linear, ..plot(vec![(0.0, 3.0), (500.0, 0.5), (1000.0, 2.0)]) };
        write_svg(&[falling, rising, timed], &path).unwrap();
        let svg = std::fs::read_to_string(&path).unwrap();
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
        for word in ["Reads &amp; cache", "cache, percent", "optimum", "<polyline", "0.5", "Hits"] {
            assert!(svg.contains(word), "{word}");
        }
        // Ticks at equal distances, down to 0.
        let ticks = ["0", "200", "400", "600", "800"].map(|tick| {
            let below = |(_, text): &&(f64, &str)| *text == tick;
            places(&svg, "text").iter().rfind(below).unwrap_or_else(|| panic!("{tick}")).0
        });
        let steps: Vec<f64> = ticks.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert!(steps[0] > 50.0 && steps.iter().all(|step| (step - steps[0]).abs() <= 2.0), "{ticks:?}");
    }

    /// The x coordinates of everything of a kind, and of texts what they say.
    fn places<'a>(svg: &'a str, element: &str) -> Vec<(f64, &'a str)> {
        let number = |text: &str, name: &str| -> Option<f64> {
            text.split_once(&format!(" {name}=\""))?.1.split_once('"')?.0.parse().ok()
        };
        let tag = format!("<{element}");
        let parts = svg.split(&*tag).skip(1);
        let name = if element == "circle" { "cx" } else { "x" };
        parts
            .filter_map(|part| Some((number(part, name)?, part.split_once('>')?.1.split_once('<')?.0.trim())))
            .collect()
    }

    #[test]
    fn the_legend_stands_beside_the_lines_and_labels_apart() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("plot.svg");
        let points = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0].map(|x: f64| (x, x.ln())).to_vec();
        write_svg(&[plot(points)], &path).unwrap();
        let svg = std::fs::read_to_string(&path).unwrap();
        let edge = f64::from(WIDTH - LEGEND_WIDTH);
        let (names, others): (Vec<_>, Vec<_>) =
            places(&svg, "text").into_iter().partition(|(_, text)| *text == "optimum");
        assert!(names.len() == 1 && names[0].0 > edge, "{names:?}");
        assert!(others.iter().all(|(x, _)| *x < edge), "{others:?}");
        // The marks of the line, and the one in the legend.
        let marks = places(&svg, "circle");
        assert_eq!(marks.iter().filter(|(x, _)| *x > edge).count(), 1, "{marks:?}");
        // Numbers below the axis, from left to right: each is as wide as its digits at most.
        let is_power = |text: &str| text.parse::<f64>().is_ok_and(|x| x >= 1.0 && x.log2().fract() == 0.0);
        let mut ticks: Vec<_> = others.into_iter().filter(|(x, text)| *x > 90.0 && is_power(text)).collect();
        ticks.sort_by(|a, b| a.0.total_cmp(&b.0));
        assert!(ticks.len() >= 4, "{ticks:?}");
        assert!(ticks.windows(2).all(|pair| pair[1].0 - pair[0].0 > 9.0 * pair[1].1.len() as f64), "{ticks:?}");
    }

    #[test]
    fn what_cannot_be_drawn_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        for points in [vec![], vec![(0.0, 1.0)], vec![(1.0, f64::NAN)]] {
            assert!(write_svg(&[plot(points)], &folder.path().join("plot.svg")).is_err());
        }
        let error = write_svg(&[plot(vec![(1.0, 1.0)])], Path::new("/nowhere/plot.svg")).unwrap_err();
        assert!(error.to_string().contains("/nowhere/plot.svg"));
    }
}
