//! README says what is true: its rules load and do what it says of them, and it knows every setting.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::support::{TestLimiter, request};

fn readme() -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md")).unwrap()
}

/// The fenced blocks of YAML.
fn yaml_blocks(readme: &str) -> Vec<&str> {
    readme
        .split("```yaml\n")
        .skip(1)
        .map(|rest| rest.split("```").next().unwrap())
        .collect()
}

#[test]
fn its_rules_do_what_it_says() {
    let readme = readme();
    let rules: Vec<&str> = yaml_blocks(&readme)
        .into_iter()
        .filter(|block| block.starts_with("domain:"))
        .collect();
    assert_eq!(rules.len(), 2);
    let shop = TestLimiter::new(rules[0]);
    for (descriptor, expected) in [
        ("remote_address=198.51.100.7", "OK: OK99"),
        ("remote_address=203.0.113.20", "OK: UNL"),
        ("path=/login;remote_address=198.51.100.7", "OK: OK4"),
        ("path=/login", "OK: NONE"),
    ] {
        assert_eq!(
            shop.brief(&request("shop", &[descriptor])),
            expected,
            "{descriptor}"
        );
    }
    let edge = TestLimiter::new(rules[1]);
    for (chain, expected) in [
        ("6.6.6.6, 192.0.2.1, 198.51.100.7, 10.0.0.1", "OK: OK99"),
        ("192.0.2.1, 127.0.0.1", "OK: OK98"),
        ("2001:db8:0:1::1", "OK: OK4999"),
        ("2001:db8:0:2::1", "OK: OK4998"),
        ("203.0.113.9:1234", "OK: OK4999"),
    ] {
        let call = request("edge", &[&format!("x-forwarded-for={chain}")]);
        assert_eq!(edge.brief(&call), expected, "{chain}");
    }
}

#[test]
fn it_knows_every_variable_and_flag() {
    let readme = readme();
    let help = Command::new(env!("CARGO_BIN_EXE_tollgate"))
        .env_clear()
        .args(["serve", "--help"])
        .output()
        .unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    // The help wraps lines wherever it likes.
    let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
    let variables: Vec<&str> = help
        .split("[env: ")
        .skip(1)
        .map(|rest| rest.split('=').next().unwrap())
        .collect();
    assert!(variables.len() > 20, "{variables:?}");
    for variable in variables {
        assert!(
            readme.contains(&format!("`{variable}`")),
            "README does not know {variable}"
        );
    }
    for flag in readme
        .split("`--")
        .skip(1)
        .map(|rest| rest.split(['`', ' ']).next().unwrap())
    {
        let known = help.contains(&format!("--{flag}")) || ["print", "metrics", "summary"].contains(&flag);
        assert!(known, "README has the flag --{flag}, which does not exist");
    }
}
