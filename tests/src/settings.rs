//! Seeds, durations and sizes: from environment variables in tests, from `--name value` pairs in programs.

use std::{any::type_name, collections::BTreeMap, ffi::OsString, fmt::Display, str::FromStr};

use anyhow::{Context, bail};

/// The value of an environment variable, or `default` if it is not set.
///
/// # Panics
/// If it is set to something that is no `T`: a test that runs with a setting nobody asked for proves the wrong thing.
pub fn from_env<T: FromStr>(name: &str, default: T) -> T {
    asked_for(name).unwrap_or(default)
}

/// The value of an environment variable, if it is set.
///
/// # Panics
/// As [`from_env`].
pub fn asked_for<T: FromStr>(name: &str) -> Option<T> {
    let text = std::env::var_os(name)?;
    let parsed = text.to_str().and_then(|text| text.parse().ok());
    Some(parsed.unwrap_or_else(|| panic!("{name} is set to {text:?}, which is no {}", type_name::<T>())))
}

/// The seed of a test: `FARLINK_TEST_SEED`, or a fresh one. Printed, so that a failed run can be had again.
pub fn seed(test: &str) -> u64 {
    let seed = from_env("FARLINK_TEST_SEED", rand::random());
    println!("{test}: FARLINK_TEST_SEED={seed}");
    seed
}

/// The arguments of a program: `--name value` pairs.
#[derive(Debug, Default)]
pub struct Arguments(BTreeMap<String, String>);

impl Arguments {
    /// Takes the pairs apart.
    ///
    /// # Errors
    /// If an argument is no name, has no value, or comes twice.
    pub fn parse(arguments: impl IntoIterator<Item = OsString>) -> anyhow::Result<Self> {
        let mut pairs = BTreeMap::new();
        let mut arguments = arguments.into_iter();
        while let Some(argument) = arguments.next() {
            let name = argument.to_str().and_then(|name| name.strip_prefix("--"));
            let name = name.with_context(|| format!("{argument:?} is not of the form --name"))?.to_owned();
            let value = arguments.next().with_context(|| format!("--{name} needs a value"))?;
            let value = value.to_str().with_context(|| format!("--{name} {value:?} is no text"))?.to_owned();
            if pairs.insert(name.clone(), value).is_some() {
                bail!("--{name} is given twice");
            }
        }
        Ok(Self(pairs))
    }

    /// Sets `to` if there is an argument of this name.
    ///
    /// # Errors
    /// If its value is no `T`.
    pub fn take<T: FromStr<Err: Display>>(&mut self, name: &str, to: &mut T) -> anyhow::Result<()> {
        if let Some(text) = self.0.remove(name) {
            *to = text.parse().map_err(|error| anyhow::anyhow!("--{name} {text}: {error}"))?;
        }
        Ok(())
    }

    /// Ends the parsing.
    ///
    /// # Errors
    /// If an argument is left that nobody took.
    pub fn finish(self) -> anyhow::Result<()> {
        match self.0.into_keys().next() {
            Some(name) => bail!("there is no option --{name}"),
            None => Ok(()),
        }
    }
}
