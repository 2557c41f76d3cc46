//! Values that go into messages, and come from the command line, by their names.

use std::{fmt::Display, str::FromStr};

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use farlink_offload::{AccessMode, Durability};
use farlink_runtime::layout::Records;
use serde::{Deserialize as _, Deserializer, Serializer, de::Error as _};

pub(crate) fn serialize<S: Serializer>(value: &impl Display, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(value)
}

pub(crate) fn deserialize<'de, D: Deserializer<'de>, T: FromStr<Err: Display>>(deserializer: D) -> Result<T, D::Error> {
    String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
}

/// Takes an access mode from the command line.
pub(crate) fn access_mode() -> impl TypedValueParser<Value = AccessMode> {
    let values = AccessMode::ALL.map(|mode| PossibleValue::new(mode.name()).help(mode.summary()));
    PossibleValuesParser::new(values).try_map(|name| name.parse::<AccessMode>())
}

/// Takes a durability from the command line.
pub(crate) fn durability() -> impl TypedValueParser<Value = Durability> {
    let values = Durability::ALL.map(|all| PossibleValue::new(all.name()).help(all.summary()));
    PossibleValuesParser::new(values).try_map(|name| name.parse::<Durability>())
}

/// Takes what is recorded from the command line.
pub(crate) fn records() -> impl TypedValueParser<Value = Records> {
    let values = Records::CHOICES.map(|records| PossibleValue::new(records.name()).help(records.summary()));
    PossibleValuesParser::new(values).try_map(|name| name.parse::<Records>())
}
