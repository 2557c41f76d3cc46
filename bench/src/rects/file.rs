//! `--rects-file`: rectangles from a file, in one of two formats that are told apart by content.
//!
//! - **CSV**: `x1,y1,x2,y2[,id]` a line, the low corner before the high one. Without an id, a rectangle's payload is
//!   its number in the file, from 0. Blank lines and lines that begin with `#` are skipped. The first line may be a
//!   header: it is one if it has as many fields and none of them is a number.
//! - **GeoJSON**, if the content begins with `{` and the program was built with the feature `geojson`: the bounding box
//!   of each feature.
//!
//! All of a file is read and checked before anything is stored. What is wrong is named by its line, or its feature, and
//! the reason.

use std::fs;

use anyhow::{Context as _, ensure};
use farlink_structures::rtree::{Entry, Rect};

use crate::input::{self, InputFile};
use crate::units::{parse_u64, shorten};

/// The coordinates of a line.
const FIELDS: [&str; 4] = ["x1", "y1", "x2", "y2"];
/// Some programs begin text with this.
const BYTE_ORDER_MARK: &[u8] = b"\xEF\xBB\xBF";

/// Reads a file of rectangles.
pub(super) fn read(InputFile { path, name }: &InputFile) -> anyhow::Result<Vec<Entry>> {
    let content = fs::read(path).with_context(|| format!("cannot read the rectangles file {name}"))?;
    decode(&content).with_context(|| format!("the rectangles file {name}"))
}

fn decode(content: &[u8]) -> anyhow::Result<Vec<Entry>> {
    let content = content.strip_prefix(BYTE_ORDER_MARK).unwrap_or(content);
    let entries = match content.trim_ascii_start().first() {
        Some(b'{') => decode_geojson(content)?,
        _ => decode_csv(content)?,
    };
    ensure!(!entries.is_empty(), "it holds no rectangles; give x1,y1,x2,y2 or x1,y1,x2,y2,id a line");
    Ok(entries)
}

#[cfg(feature = "geojson")]
fn decode_geojson(content: &[u8]) -> anyhow::Result<Vec<Entry>> {
    super::geojson::decode(content)
}

#[cfg(not(feature = "geojson"))]
fn decode_geojson(_content: &[u8]) -> anyhow::Result<Vec<Entry>> {
    anyhow::bail!("it looks like GeoJSON, which this program was built without: build it with `--features geojson`")
}

fn decode_csv(content: &[u8]) -> anyhow::Result<Vec<Entry>> {
    let mut lines = input::lines(content).peekable();
    let _header = lines.next_if(|line| line.as_ref().is_ok_and(|(_, line)| is_header(line)));
    let parse = |(id, line): (u64, anyhow::Result<(u64, &str)>)| {
        let (number, line) = line?;
        entry(line, id).with_context(|| format!("line {number}"))
    };
    input::all_sound((0..).zip(lines).map(parse))
}

fn fields(line: &str) -> Vec<&str> {
    line.split(',').map(str::trim).collect()
}

fn is_header(line: &str) -> bool {
    let fields = fields(line);
    matches!(fields.len(), 4 | 5) && fields.iter().all(|field| !field.is_empty() && field.parse::<f64>().is_err())
}

/// The rectangle of a line; `id` is for one that has none.
fn entry(line: &str, id: u64) -> anyhow::Result<Entry> {
    let fields = fields(line);
    ensure!(
        matches!(fields.len(), 4 | 5),
        "it has {}, not the 4 of x1,y1,x2,y2 or 5 with an id",
        crate::units::plural(fields.len() as u64, "field")
    );
    let mut corners = [0.0; 4];
    for ((corner, name), field) in corners.iter_mut().zip(FIELDS).zip(&fields) {
        *corner = coordinate(name, field)?;
    }
    let id = fields.get(4).map_or(Ok(id), |field| parse_u64(field).context("its id"))?;
    let [x1, y1, x2, y2] = corners;
    for (low, high, (from, to)) in [("x1", "x2", (x1, x2)), ("y1", "y2", (y1, y2))] {
        ensure!(from <= to, "{low} is {from}, above {high}, {to}: the low corner comes first");
    }
    Ok((Rect::new([x1, y1], [x2, y2])?, id))
}

fn coordinate(name: &str, field: &str) -> anyhow::Result<f64> {
    let number: f64 = field.parse().ok().with_context(|| format!("{name} is `{}`, not a number", shorten(field)))?;
    ensure!(!number.is_nan(), "{name} is NaN");
    ensure!(number.is_finite(), "{name} is infinite");
    Ok(number)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn error(text: &[u8]) -> String {
        format!("{:#}", decode(text).unwrap_err())
    }

    fn rect(x1: f64, y1: f64, x2: f64, y2: f64) -> Rect {
        Rect::new([x1, y1], [x2, y2]).unwrap()
    }

    #[test]
    fn lines_are_rectangles_with_ids() {
        let text =
            b"\xEF\xBB\xBFx1, y1, x2, y2, id\r\n# no\n0,0,1,1\n\n -2.5 , 1e-3, +3, .5 ,18446744073709551615\n1,1,1,1\n";
        let expected =
            [(rect(0.0, 0.0, 1.0, 1.0), 0), (rect(-2.5, 1e-3, 3.0, 0.5), u64::MAX), (rect(1.0, 1.0, 1.0, 1.0), 2)];
        assert_eq!(decode(text).unwrap(), expected);
        // Without a header, and with one that has other names.
        assert_eq!(decode(b"0,0,1,1").unwrap(), [(rect(0.0, 0.0, 1.0, 1.0), 0)]);
        assert_eq!(decode(b"\"west\",south,east,north\n0,0,1,1").unwrap().len(), 1);
    }

    #[test]
    fn errors_say_where_and_why() {
        for (text, says) in [
            ("1,2,3\n", "line 1: it has 3 fields, not the 4 of"),
            ("1,2,3,4,5,6", "line 1: it has 6 fields"),
            ("0,0,1,1\nNaN,0,1,1", "line 2: x1 is NaN"),
            ("nan,nan,nan,nan", "line 1: x1 is NaN"),
            ("0,0,inf,1", "line 1: x2 is infinite"),
            ("0,-1e999,1,1", "line 1: y1 is infinite"),
            ("# none\n0,3,1,2.5", "line 2: y1 is 3, above y2, 2.5: the low corner comes first"),
            ("1,0,0,0", "line 1: x1 is 1, above x2, 0"),
            ("0,0,1,x", "line 1: y2 is `x`, not a number"),
            ("0,0,1,", "line 1: y2 is ``, not a number"),
            ("0,0,1,1,-7", "line 1: its id: `-7` is not an unsigned integer"),
            ("0,0,1,1,18446744073709551616", "line 1: its id: `18446744073709551616` is larger"),
            ("0,0,1,1,", "line 1: its id: `` is not"),
            ("x1,y1,x2,y2\nx1,y1,x2,y2\n0,0,1,1", "line 2: x1 is `x1`, not a number"),
            ("0 0 1 1", "line 1: it has 1 field, not"),
            ("", "it holds no rectangles"),
            ("x1,y1,x2,y2\n", "it holds no rectangles"),
        ] {
            assert!(error(text.as_bytes()).contains(says), "{text}: {}", error(text.as_bytes()));
        }
        assert_eq!(error(b"0,0,1,1\n0,0,1,\xFF"), "line 2: not UTF-8 text");
        let many = "1,0,0,0\n".repeat(10) + "0,0,1,1\n";
        let said = error(many.as_bytes());
        assert!(said.starts_with("line 1: x1") && said.ends_with("; and 7 more problems"), "{said}");
        #[cfg(not(feature = "geojson"))]
        assert!(error(b" {}").contains("--features geojson"));
    }

    #[test]
    fn files_are_named_in_errors() {
        let folder = tempfile::tempdir().unwrap();
        let read = |path: &std::path::Path| read(&InputFile { path: path.to_owned(), name: "mine".into() });
        let path = folder.path().join("rects.csv");
        assert!(read(&path).unwrap_err().to_string().contains("cannot read the rectangles file mine"));
        std::fs::write(&path, "1,0,0,0").unwrap();
        assert!(format!("{:#}", read(&path).unwrap_err()).starts_with("the rectangles file mine: line 1: x1 is 1,"));
    }

    proptest! {
        #[test]
        fn any_text_gives_rectangles_or_an_error(text in "[-+0-9.,einfNaN#x{}\\n ]{0,120}") {
            if let Ok(entries) = decode(text.as_bytes()) {
                prop_assert!(!entries.is_empty());
            }
        }

        #[test]
        fn what_is_written_is_read(corners in proptest::collection::vec(any::<[f64; 4]>(), 1..20)) {
            let sound = |corners: &[f64; 4]| corners.iter().all(|at| at.is_finite());
            let rects: Vec<Rect> = corners
                .iter()
                .filter(|corners| sound(corners))
                .map(|&[a, b, c, d]| rect(a.min(c), b.min(d), a.max(c), b.max(d)))
                .collect();
            let line = |rect: &Rect| {
                let ([x1, y1], [x2, y2]) = (rect.low(), rect.high());
                format!("{x1},{y1},{x2},{y2}\n")
            };
            let text: String = rects.iter().map(line).collect();
            let read = decode(text.as_bytes()).map(|entries| entries.into_iter().map(|it| it.0).collect::<Vec<_>>());
            prop_assert_eq!(read.unwrap_or_default(), rects);
        }
    }
}
