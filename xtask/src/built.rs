//! What cargo has built, as it says itself.

use std::{
    path::PathBuf,
    process::{Command, Stdio},
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

/// A program.
#[derive(Debug)]
pub(crate) struct Executable {
    /// The name of its target.
    pub(crate) target: String,
    /// `bin`, `test` and the like.
    pub(crate) kind: String,
    /// Whether it runs tests.
    pub(crate) is_test: bool,
    pub(crate) path: PathBuf,
}

/// Runs a cargo command that builds, and returns what it names.
pub(crate) fn executables(cargo: &mut Command) -> Result<Vec<Executable>> {
    cargo.arg("--message-format=json-render-diagnostics").stdout(Stdio::piped());
    let output = cargo.spawn().context("starting cargo")?.wait_with_output()?;
    ensure!(output.status.success(), "cargo failed ({})", output.status);
    let mut executables = Vec::new();
    for line in output.stdout.split(|&byte| byte == b'\n').filter(|line| !line.is_empty()) {
        let message: Value = serde_json::from_slice(line).context("cargo printed something that is no JSON")?;
        let Some(path) = message["executable"].as_str() else { continue };
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        executables.push(Executable {
            target: text(&message["target"]["name"]),
            kind: text(&message["target"]["kind"][0]),
            is_test: message["profile"]["test"] == true,
            path: path.into(),
        });
    }
    Ok(executables)
}
