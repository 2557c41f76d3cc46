//! Rectangles from GeoJSON: the bounding box of each feature of a collection, by its coordinates. A feature's id, if it
//! has one, is a whole number, or a string of digits.

use anyhow::{Context as _, bail, ensure};
use farlink_structures::rtree::{Entry, Rect};
use geojson::{Feature, GeometryValue, Position, feature::Id};
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::input;
use crate::units::{parse_u64, plural, shorten};

/// As much of a collection as it takes to name its features by their numbers.
#[derive(Deserialize)]
struct Collection<'a> {
    #[serde(rename = "type")]
    kind: String,
    #[serde(borrow, default)]
    features: Vec<&'a RawValue>,
}

/// Errors name a feature by its number, counted from 1.
pub(super) fn decode(content: &[u8]) -> anyhow::Result<Vec<Entry>> {
    let collection: Collection<'_> = serde_json::from_slice(content).context("it is no GeoJSON")?;
    let kind = &collection.kind;
    ensure!(kind == "FeatureCollection", "it is GeoJSON of type `{}`, not a FeatureCollection", shorten(kind));
    let parse =
        |(id, feature): (u64, &&RawValue)| entry(feature.get(), id).with_context(|| format!("feature {}", id + 1));
    input::all_sound((0..).zip(&collection.features).map(parse))
}

/// The rectangle of a feature; `id` is for one that has none.
fn entry(feature: &str, id: u64) -> anyhow::Result<Entry> {
    let feature: Feature = serde_json::from_str(feature)?;
    let id = match feature.id {
        None => id,
        Some(Id::String(text)) => parse_u64(&text).context("its id")?,
        Some(Id::Number(number)) => parse_u64(&number.to_string()).context("its id")?,
    };
    let geometry = feature.geometry.context("it has no geometry")?;
    let mut corners = None;
    cover(&geometry.value, &mut corners)?;
    let (low, high) = corners.context("its geometry has no coordinates")?;
    Ok((Rect::new(low, high)?, id))
}

type Corners = Option<([f64; 2], [f64; 2])>;

/// Enlarges a box so that it covers a geometry.
fn cover(geometry: &GeometryValue, corners: &mut Corners) -> anyhow::Result<()> {
    let mut all = |positions: &[Position]| positions.iter().try_for_each(|position| cover_position(position, corners));
    match geometry {
        GeometryValue::Point { coordinates } => cover_position(coordinates, corners),
        GeometryValue::MultiPoint { coordinates } | GeometryValue::LineString { coordinates } => all(coordinates),
        GeometryValue::MultiLineString { coordinates } | GeometryValue::Polygon { coordinates } => {
            coordinates.iter().try_for_each(|positions| all(positions))
        }
        GeometryValue::MultiPolygon { coordinates } => {
            coordinates.iter().flatten().try_for_each(|positions| all(positions))
        }
        GeometryValue::GeometryCollection { geometries } => {
            geometries.iter().try_for_each(|geometry| cover(&geometry.value, corners))
        }
    }
}

fn cover_position(position: &Position, corners: &mut Corners) -> anyhow::Result<()> {
    let &[x, y, ..] = position.as_slice() else {
        bail!("a position has {}, not 2", plural(position.len() as u64, "coordinate"));
    };
    let (low, high) = corners.get_or_insert(([x, y], [x, y]));
    *low = [low[0].min(x), low[1].min(y)];
    *high = [high[0].max(x), high[1].max(y)];
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn collection(features: &[&str]) -> String {
        format!(r#"{{"type": "FeatureCollection", "features": [{}]}}"#, features.join(","))
    }

    fn feature(geometry: &str, more: &str) -> String {
        format!(r#"{{"type": "Feature", "properties": null, "geometry": {geometry}{more}}}"#)
    }

    fn error(text: &str) -> String {
        format!("{:#}", decode(text.as_bytes()).unwrap_err())
    }

    const POINT: &str = r#"{"type": "Point", "coordinates": [1.5, 2, 100]}"#;

    #[test]
    fn every_geometry_has_its_bounding_box() {
        let geometries = [
            POINT,
            r#"{"type": "MultiPoint", "coordinates": [[0, 5], [3, 1]]}"#,
            r#"{"type": "LineString", "coordinates": [[-1, 0], [0, 1], [1, -1]]}"#,
            r#"{"type": "MultiLineString", "coordinates": [[[0, 0], [1, 1]], [[5, -2], [6, 0]]]}"#,
            r#"{"type": "Polygon", "coordinates": [[[0, 0], [4, 0], [4, 3], [0, 3], [0, 0]]]}"#,
            r#"{"type": "MultiPolygon", "coordinates": [[[[0, 0], [1, 0], [1, 1], [0, 0]]], [[[7, 7], [8, 7], [8, 9], [7, 7]]]]}"#,
            r#"{"type": "GeometryCollection", "geometries": [{"type": "Point", "coordinates": [9, 0]},
                {"type": "LineString", "coordinates": [[0, 1], [1, 2]]}]}"#,
        ];
        let ids = ["", r#", "id": 7"#, r#", "id": "18446744073709551615""#, "", "", "", r#", "id": null"#];
        let features: Vec<String> = geometries.iter().zip(ids).map(|(geometry, id)| feature(geometry, id)).collect();
        let features: Vec<&str> = features.iter().map(String::as_str).collect();
        let found = decode(collection(&features).as_bytes()).unwrap();
        let boxes: Vec<[f64; 4]> =
            found.iter().map(|(r, _)| [r.low()[0], r.low()[1], r.high()[0], r.high()[1]]).collect();
        let expected = [
            [1.5, 2.0, 1.5, 2.0],
            [0.0, 1.0, 3.0, 5.0],
            [-1.0, -1.0, 1.0, 1.0],
            [0.0, -2.0, 6.0, 1.0],
            [0.0, 0.0, 4.0, 3.0],
            [0.0, 0.0, 8.0, 9.0],
            [0.0, 0.0, 9.0, 2.0],
        ];
        assert_eq!(boxes, expected);
        assert_eq!(found.iter().map(|entry| entry.1).collect::<Vec<_>>(), [0, 7, u64::MAX, 3, 4, 5, 6]);
    }

    #[test]
    fn errors_say_which_feature_and_why() {
        let sound = feature(POINT, "");
        for (wrong, says) in [
            (feature("null", ""), "it has no geometry"),
            (feature(r#"{"type": "LineString", "coordinates": []}"#, ""), "no coordinates"),
            (feature(r#"{"type": "Point", "coordinates": [1]}"#, ""), "two or more elements"),
            (feature(r#"{"type": "Point", "coordinates": [1, "x"]}"#, ""), ""),
            (feature(r#"{"type": "Spiral", "coordinates": [1, 2]}"#, ""), "Spiral"),
            (feature(POINT, r#", "id": -3"#), "its id: `-3` is not an unsigned integer"),
            (feature(POINT, r#", "id": 1.5"#), "its id: `1.5` is not an unsigned integer"),
            (feature(POINT, r#", "id": "way/7""#), "its id: `way/7` is not an unsigned integer"),
            ("7".to_owned(), ""),
        ] {
            let said = error(&collection(&[&sound, &wrong]));
            assert!(said.starts_with("feature 2: ") && said.contains(says), "{wrong}: {said}");
        }
        let whole = collection(&[&sound]);
        assert!(error(&whole[..whole.len() - 1]).starts_with("it is no GeoJSON: EOF"));
        assert!(error(&format!("{whole}]")).contains("trailing characters"));
        assert!(error(&whole.replace("1.5", "1e999")).contains("number out of range"));
        assert!(error(&sound).contains("of type `Feature`, not a FeatureCollection"));
        assert!(error("{}").contains("missing field `type`"));
    }
}
