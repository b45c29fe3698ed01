//! What is said about rule files, word for word.

use std::fs;
use std::path::PathBuf;

use tollgate::config::file;
use tollgate::config::{RulesConfig, RulesSource, RuntimeDirectory};

use crate::support::{TestLimiter, request, source};

/// Errors, then warnings, one line each.
fn said_of(files: &[(&str, &str)]) -> String {
    let files: Vec<_> = files.iter().map(|(name, text)| source(name, text)).collect();
    let (errors, diagnostics) = match file::load(&files, false) {
        Ok(loaded) => (Vec::new(), loaded.diagnostics),
        Err(diagnostics) => (
            diagnostics.errors().map(ToString::to_string).collect(),
            diagnostics,
        ),
    };
    let warnings = diagnostics.warnings().map(ToString::to_string);
    errors.into_iter().chain(warnings).collect::<Vec<_>>().join("\n")
}

#[track_caller]
fn test(yaml: &str, expected: &str) {
    let said = said_of(&[("r.yaml", yaml)]);
    assert_eq!(said, expected.trim(), "\n--- said:\n{said}\n");
}

#[test]
fn five_mistakes_are_five_errors_with_advice() {
    test(
        r#"domain: shop
descriptors:
  - key: ip
    value: 1.5
    rate_limit: {unit: minutes, requests_per_unit: 2}
  - key: path
    Value: /x
  - key: user
    shadow_mode: "true"
    rate_limit: {unit: hour, requests_per_unit: 1}
  - key: ip
    value: 1.5
"#,
        r#"
r.yaml:4:12: shop: 1.5 is a floating-point number to YAML; quote it: "1.5"
r.yaml:5:24: shop.ip_1.5.rate_limit: unit "minutes" is not known; did you mean minute?
r.yaml:7:5: shop: unknown key 'Value'; did you mean value?
r.yaml:9:18: shop.user: shadow_mode must be true or false, not the text "true"; write shadow_mode: true or shadow_mode: false, without quotes
r.yaml:12:12: shop: 1.5 is a floating-point number to YAML; quote it: "1.5"
"#,
    );
}

#[test]
fn a_misspelt_key_is_reported_once() {
    test(
        "domian: shop\ndescriptors: [{key: k, rate_limit: {unlimied: true}}]\n",
        "
r.yaml:1:1: unknown key 'domian'; did you mean domain?
r.yaml:2:37: ?.k.rate_limit: unknown key 'unlimied'; did you mean unlimited?
",
    );
}

#[test]
fn a_wrong_domain_does_not_hide_what_comes_after_it() {
    test(
        "domain: [shop]\ndescriptors: [{key: k, valeu: v}]\n",
        r#"
r.yaml:1:9: domain must be text, not a list; write domain: "..."
r.yaml:2:24: ?: unknown key 'valeu'; did you mean value?
"#,
    );
}

#[test]
fn values_of_the_wrong_kind_name_what_to_write() {
    test(
        r#"domain: shop
descriptors:
  - {key: {a: b}, rate_limit: []}
  - just text
  - {key: a, rate_limit: {unit: day, requests_per_unit: -1}}
  - {key: b, rate_limit: {unit: day, requests_per_unit: 2.5}}
  - {key: c, rate_limit: {unit: day, requests_per_unit: 1e+06}}
  - {key: d, rate_limit: {unit: day, requests_per_unit: 4294967296}}
  - {key: e, rate_limit: {unit: day, requests_per_unit: 1, unit_multiplier: 0}}
  - {key: f, rate_limit: {unit: 60s, requests_per_unit: 1}}
  - {key: g, descriptors: {key: h}}
"#,
        r#"
r.yaml:3:11: shop: key must be text, not a mapping; write key: "..."
r.yaml:3:31: shop.?.rate_limit: rate_limit must be a mapping, not a list; write keys and values; its keys are unit, requests_per_unit, unlimited, name, replaces, unit_multiplier, algorithm, window_start, time_zone, burst_size, burst, charge_refused, on_exceeded, ban
r.yaml:4:5: shop: a list may hold only mappings, not the text "just text"; write a dash and then keys with values
r.yaml:5:57: shop.a.rate_limit: requests_per_unit cannot be -1; write a whole number from 0 to 4294967295
r.yaml:6:57: shop.b.rate_limit: requests_per_unit cannot be 2.5; write a whole number from 0 to 4294967295
r.yaml:7:57: shop.c.rate_limit: requests_per_unit cannot be 1e+06; write requests_per_unit: 1000000
r.yaml:8:57: shop.d.rate_limit: requests_per_unit cannot be 4294967296; write a whole number from 0 to 4294967295
r.yaml:9:77: shop.e.rate_limit: unit_multiplier cannot be 0; write a whole number from 1 to 4294967295
r.yaml:10:33: shop.f.rate_limit: unit "60s" is a minute; write unit: minute
r.yaml:11:27: shop.g: descriptors must be a list, not a mapping; start each entry with a dash
"#,
    );
}

#[test]
fn keys_in_the_wrong_place_and_flags_without_effect_are_warnings() {
    test(
        "domain: shop
key: stray
descriptors:
  - {key: a, unlimited: true, unit: second}
  - {key: b, rate_limit: {unit: day, requests_per_unit: 1, shadow_mode: true}}
  - {key: c, quota_mode: yes, metadata: {x: 1}}
  - {key: d, rate_limit: {unit: day}}
  - {key: e, key: f, rate_limit: {unit: day, requests_per_unit: 1}}
---
domain: other
",
        "
r.yaml:2:1: warning: key has no effect in the file; it belongs in a descriptor
r.yaml:4:14: warning: shop: unlimited has no effect in a descriptor; it belongs in rate_limit
r.yaml:4:31: warning: shop: unit has no effect in a descriptor; it belongs in rate_limit
r.yaml:5:60: warning: shop.b.rate_limit: shadow_mode has no effect in rate_limit; it belongs in a descriptor
r.yaml:6:14: warning: shop.c: quota_mode has no effect without a rate_limit beside it; add rate_limit here, or take it out
r.yaml:6:31: warning: shop.c: metadata has no effect without a rate_limit beside it; add rate_limit here, or take it out
r.yaml:7:26: warning: shop.d.rate_limit: without requests_per_unit nothing passes; add it; write requests_per_unit: 0 if that is what you want
r.yaml:8:14: warning: shop: key is written twice, first at line 8; the last one counts; take out the other
r.yaml:9:1: warning: a second document starts here; only the first is read; put it into a file of its own
",
    );
}

#[test]
fn a_misplaced_value_is_still_checked() {
    test(
        "domain: shop
unit: 1.5
value: {valeu: x, metadata: {any: 1.5}}
replaces: [x]
descriptors: [{key: k, unit_multiplier: 2}]
",
        r#"
r.yaml:2:7: 1.5 is a floating-point number to YAML; quote it: "1.5"
r.yaml:3:9: unknown key 'valeu'; did you mean value?
r.yaml:4:12: a list may hold only mappings, not the text "x"; write a dash and then keys with values
r.yaml:5:24: shop: unit_multiplier cannot stand in a descriptor; it belongs in rate_limit
r.yaml:2:1: warning: unit has no effect in the file; it belongs in rate_limit
r.yaml:3:1: warning: value has no effect in the file; it belongs in a descriptor
r.yaml:4:1: warning: replaces has no effect in the file; it belongs in rate_limit
"#,
    );
}

#[test]
fn every_check_of_a_rule_names_its_place() {
    test(
        "domain: shop
charge: sometimes
descriptors:
  - {key: a, rate_limit: {unlimited: true, unit: day, unit_multiplier: 2}}
  - {key: b, rate_limit: {name: n, replaces: [{name: n}, {name: }, {}], unit: day, requests_per_unit: 1}}
  - {key: c, value: x, share_threshold: true}
  - {key: ''}
  - {value: v}
  - {key: d, metadata: [1]}
  - {key: e, metadata: {x: .inf}}
  - {key: f, rate_limit: {unit: ~}}
  - {key: f}
0.25: x
on: y
",
        "
r.yaml:2:9: shop.charge: 'sometimes' is no way to charge; write each or all_or_nothing
r.yaml:4:44: shop.a.rate_limit: an unlimited limit has no unit; take out unit, or unlimited
r.yaml:4:55: shop.a.rate_limit: an unlimited limit has no unit_multiplier; take out unit_multiplier, or unlimited
r.yaml:5:54: shop.b.rate_limit: the rule replaces itself: 'n' is its own name; name another rule, or take replaces out
r.yaml:5:58: shop.b.rate_limit: an entry of replaces has no name; write replaces: [{name: NAME}] with the name of the rule to drop
r.yaml:5:68: shop.b.rate_limit: an entry of replaces has no name; write replaces: [{name: NAME}] with the name of the rule to drop
r.yaml:6:24: shop.c_x: share_threshold needs a value with '*', or a value_cidr, but this is c_x; put a * into value, or take share_threshold out
r.yaml:7:5: shop: this descriptor has an empty key; write key: NAME
r.yaml:8:5: shop: this descriptor has an empty key; write key: NAME
r.yaml:9:24: shop.d.metadata: metadata must be a mapping, not a list; write keys and values
r.yaml:10:28: shop.e.metadata: .inf cannot be sent as metadata; quote it: \".inf\"
r.yaml:11:27: shop.f.rate_limit: unit is empty; write unit: and one of second, minute, hour, day, week, month or year, or a length such as 500ms, 10s, 15m, 5h or 3d
r.yaml:12:5: shop.f: duplicate descriptor: f is already at r.yaml:11:5; keep one of them; several files cannot add below one descriptor
r.yaml:13:1: 0.25 is not a key: YAML does not read it as text; keys are words such as domain, descriptors, key, value, rate_limit
r.yaml:14:1: on is not a key: YAML does not read it as text; keys are words such as domain, descriptors, key, value, rate_limit
r.yaml:10:14: warning: shop.e: metadata has no effect without a rate_limit beside it; add rate_limit here, or take it out
",
    );
}

#[test]
fn what_is_not_yaml_is_named_with_its_line() {
    #[track_caller]
    fn test(yaml: &str, place: &str, advice: &str) {
        let said = said_of(&[("r.yaml", yaml)]);
        assert!(said.starts_with(&format!("r.yaml:{place}")), "{said}");
        assert!(said.contains(advice), "{said}");
    }
    test(
        "domain: d\ndescriptors:\n  - {key: k, value: *}\n",
        "3:",
        "must be quoted: \"*\"",
    );
    test(
        "domain: d\ndescriptors:\n\t- {key: k}\n",
        "3:",
        "indent with spaces",
    );
    test("domain: \"d\n", "", "not YAML");
    test(
        "- domain: d\n",
        "1:1: the file must be a mapping, not a list",
        "write keys and values",
    );
    test("", "1:1: the file is empty", "write domain: NAME");
    test(
        "domain: &d {x: *d}\n",
        "1:16: ",
        "stands inside the block that it refers to",
    );
    test("domain: *nowhere\n", "1:", "");
}

#[test]
fn faults_of_all_files_are_reported_together() {
    let said = said_of(&[
        (
            "a.yaml",
            "domain: one\ndescriptors: [{key: k, rate_limit: {unit: fortnight}}]\n",
        ),
        ("b.yaml", "domain: two\n"),
        ("c.yaml", "domain: two\n"),
    ]);
    let expected = "
a.yaml:2:43: one.k.rate_limit: unit \"fortnight\" is not known; write second, minute, hour, day, week, month or year, or a length such as 500ms, 10s, 15m, 5h or 3d
c.yaml:1:9: duplicate domain 'two', already in b.yaml:1:9; put its descriptors into one file, or set MERGE_DOMAIN_CONFIG=true
";
    assert_eq!(said, expected.trim());
}

#[test]
fn files_of_one_domain_cannot_disagree_on_what_is_charged() {
    let files = [
        source("a.yaml", "domain: d\ncharge: each\n"),
        source("b.yaml", "domain: d\ncharge: all_or_nothing\n"),
        source("c.yaml", "domain: d\n"),
    ];
    let diagnostics = file::load(&files, true).unwrap_err();
    let errors: Vec<String> = diagnostics.errors().map(ToString::to_string).collect();
    assert_eq!(
        errors,
        ["b.yaml:2:9: d.charge: another file of this domain says otherwise; say it in one file only"]
    );
}

#[test]
fn keys_that_the_reference_would_mix_up_are_pointed_out() {
    let said = said_of(&[(
        "r.yaml",
        "domain: d
descriptors:
  - {key: user, value: '*', rate_limit: {unit: hour, requests_per_unit: 1}}
  - {key: user_id, rate_limit: {unit: hour, requests_per_unit: 1}}
  - {key: remote_address, rate_limit: {unit: hour, requests_per_unit: 1}}
  - {key: 'kw*', rate_limit: {unit: hour, requests_per_unit: 1}}
",
    )]);
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(lines.len(), 2, "{said}");
    assert!(
        lines[0].starts_with("r.yaml:4:11: warning: d: the keys user and user_id are told apart"),
        "{said}"
    );
    assert!(
        lines[1].starts_with("r.yaml:6:11: warning: d: the * in the key kw* is an ordinary character"),
        "{said}"
    );
}

/// Compared with yaml.v2, which lets the last one win; YAML itself lets the written one win.
#[test]
fn merge_keys_work_as_in_the_reference() {
    let rules = "
domain: d
descriptors:
  - {key: a, rate_limit: &std {unit: hour, requests_per_unit: 5}}
  - {key: b, rate_limit: {<<: *std, requests_per_unit: 48}}
  - {key: c, rate_limit: {requests_per_unit: 48, <<: *std}}
  - {key: d, rate_limit: {<<: [*std, {unit: day, requests_per_unit: 7, name: n}]}}
";
    let limiter = TestLimiter::new(rules);
    for (descriptor, left) in [("a=1", 4), ("b=1", 47), ("c=1", 4), ("d=1", 4)] {
        assert_eq!(
            limiter.brief(&request("d", &[descriptor])),
            format!("OK: OK{left}"),
            "{descriptor}"
        );
    }
    let said = said_of(&[("r.yaml", rules)]);
    assert_eq!(
        said,
        "r.yaml:6:27: warning: d.c.rate_limit: requests_per_unit comes before << and is overwritten by what << brings; \
         write << first if the value here is the one you want"
    );
}

/// Compared with envoyproxy/ratelimit's loader: what stands in the way of an earlier `rate_limit` is added to it.
#[test]
fn limits_that_meet_are_joined_as_in_the_reference() {
    let rules = "
domain: d
descriptors:
  - &a {key: a, rate_limit: {unit: minute, requests_per_unit: 100, name: foo}}
  - {<<: *a, key: b, rate_limit: {unit: hour}}
  - {<<: *a, key: c, rate_limit: {requests_per_unit: 5}}
  - {<<: *a, key: d, rate_limit: {requests_per_unit: 7, unit: day}}
  - {<<: *a, key: e, rate_limit: ~}
  - {key: f, rate_limit: {unit: hour, requests_per_unit: 9}, rate_limit: {requests_per_unit: 3}}
";
    let loaded = file::load(&[source("r.yaml", rules)], false).unwrap();
    let limits: Vec<String> = loaded
        .matcher
        .domains()
        .flat_map(|domain| domain.rules())
        .map(|rule| format!("{} {} {}", rule.path, rule.limit, rule.limits()[0].name))
        .collect();
    assert_eq!(
        limits,
        [
            "d.a 100 per MINUTE foo",
            "d.b 100 per HOUR foo",
            "d.c 5 per MINUTE foo",
            "d.d 7 per DAY foo",
            "d.f 3 per HOUR ",
        ]
    );
    let said: Vec<String> = loaded.diagnostics.warnings().map(ToString::to_string).collect();
    assert_eq!(
        said,
        [
            "r.yaml:9:62: warning: d: rate_limit is written twice, first at line 9; the last one counts, and of the first \
          what the last does not say; write one"
        ]
    );
    test(
        "domain: d
descriptors:
  - {key: a, rate_limit: &std {unit: minute, requests_per_unit: 100}}
  - {key: b, rate_limit: *std, rate_limit: {unlimited: true}}
",
        "
r.yaml:3:32: d.b.rate_limit: an unlimited limit has no unit; take out unit, or unlimited
r.yaml:4:32: warning: d: rate_limit is written twice, first at line 4; the last one counts, and of the first what the last does not say; write one
",
    );
}

#[test]
fn metadata_that_meets_is_joined_at_its_top() {
    let rules = "
domain: d
descriptors:
  - {key: a, rate_limit: {unlimited: true}, metadata: {x: 1, z: {q: 1}}, metadata: {y: 2, z: {r: 2}}}
";
    let loaded = file::load(&[source("r.yaml", rules)], false).unwrap();
    let domain = loaded.matcher.domains().next().unwrap();
    let metadata = domain.rules().next().unwrap().metadata.clone().unwrap();
    assert_eq!(
        serde_json::Value::Object(metadata),
        serde_json::json!({"x": 1, "y": 2, "z": {"r": 2}})
    );
}

#[test]
fn metadata_that_clients_could_not_decode_is_refused() {
    let nested = |levels: usize| {
        format!(
            "domain: d\ndescriptors:\n  - {{key: a, rate_limit: {{unlimited: true}}, metadata: {}1{}}}\n",
            "{a: ".repeat(levels),
            "}".repeat(levels)
        )
    };
    assert_eq!(said_of(&[("r.yaml", &nested(29))]), "");
    assert_eq!(
        said_of(&[("r.yaml", &nested(30))]),
        "r.yaml:3:55: d.a.metadata: metadata has more than 30 levels; flatten it: clients would not decode it"
    );
}

#[test]
fn a_small_file_cannot_grow_without_bound() {
    let mut yaml =
        String::from("domain: d\ndescriptors:\n  - {key: k0, descriptors: &a0 [{key: x}, {key: y}]}\n");
    for i in 1..40 {
        let below = i - 1;
        yaml.push_str(&format!(
            "  - {{key: k{i}, descriptors: &a{i} [{{key: x, descriptors: *a{below}}}, {{key: y, descriptors: *a{below}}}]}}\n"
        ));
    }
    let said = said_of(&[("r.yaml", &yaml)]);
    assert!(
        said.contains("this is too large; use fewer aliases of aliases"),
        "{said}"
    );
    assert_eq!(said.lines().count(), 1, "{said}");

    let bomb_of = |metadata: &str| {
        let mut yaml = String::from("domain: d\ndescriptors:\n");
        for i in 0..300 {
            let below = if i == 0 {
                "1".to_owned()
            } else {
                metadata.replace("BELOW", &format!("*a{}", i - 1))
            };
            yaml.push_str(&format!("  - {{key: k{i}, metadata: {{x: &a{i} {below}}}}}\n"));
        }
        said_of(&[("r.yaml", &yaml)])
    };
    assert!(bomb_of("[BELOW, BELOW]").contains("this is too large"));
    assert!(bomb_of("[BELOW]").contains("this is nested too deeply; flatten it"));
    assert!(bomb_of("{<<: BELOW}").contains("this is nested too deeply; flatten it"));
}

#[test]
fn directories_hold_rules_as_the_reference_lays_them_out() {
    let root = tempfile::tempdir().unwrap();
    let write = |path: &str, domain: &str| {
        let path = root.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, format!("domain: {domain}\n")).unwrap();
    };
    write("sub/config/a.yaml", "a");
    write("sub/config/deeper/b", "b");
    write("sub/config/.hidden/c.yaml", "c");
    write("sub/config/..2031_01_01/d.yaml", "d");
    write("sub/config.e.yaml", "e");
    write("sub/config.d/f.yaml", "f");
    write("sub/other/g.yaml", "g");
    write("sub/configuration.yaml", "h");

    let domains = |subdirectory: &str, watch_root, ignore_dotfiles| {
        let runtime = RuntimeDirectory {
            root: root.path().to_owned(),
            subdirectory: PathBuf::from(subdirectory),
            appdirectory: "config".into(),
            watch_root,
        };
        let rules = RulesConfig {
            source: RulesSource::Runtime(runtime),
            merge_domains: false,
            ignore_dotfiles,
        };
        let matcher = rules.load().map_err(|error| error.to_string())?.matcher;
        let mut domains: Vec<String> = matcher.domains().map(|domain| domain.name().to_owned()).collect();
        domains.sort();
        Ok::<_, String>(domains.concat())
    };
    assert_eq!(domains("sub", true, false).unwrap(), "abcef");
    assert_eq!(domains("/sub", true, true).unwrap(), "abef");
    assert_eq!(domains("sub", false, true).unwrap(), "ab");
    let error = domains("nowhere", false, true).unwrap_err();
    assert!(
        error.contains(&format!("{}/nowhere/config", root.path().display())),
        "{error}"
    );
    assert!(error.contains("No such file"), "{error}");
}

#[test]
fn without_a_subdirectory_the_rules_are_right_below_the_root() {
    let root = tempfile::tempdir().unwrap();
    for (directory, domain) in [("config", "a"), ("limits", "b")] {
        let directory = root.path().join(directory);
        fs::create_dir(&directory).unwrap();
        fs::write(directory.join("rules.yaml"), format!("domain: {domain}\n")).unwrap();
    }
    for (subdirectory, appdirectory, domain) in
        [("", "config", "a"), ("/", "config", "a"), ("", "limits", "b")]
    {
        for watch_root in [true, false] {
            let rules = RulesConfig {
                source: RulesSource::Runtime(RuntimeDirectory {
                    root: root.path().to_owned(),
                    subdirectory: subdirectory.into(),
                    appdirectory: appdirectory.into(),
                    watch_root,
                }),
                merge_domains: false,
                ignore_dotfiles: true,
            };
            let matcher = rules.load().unwrap().matcher;
            let domains: Vec<&str> = matcher.domains().map(|domain| domain.name()).collect();
            assert_eq!(domains, [domain], "{subdirectory:?} {appdirectory} {watch_root}");
        }
    }
}

#[test]
fn added_keys_that_mean_nothing_together_are_refused() {
    test(
        "domain: d
descriptors:
  - {key: a, rate_limit: {unit: hour, requests_per_unit: 1, burst_size: 5}}
  - {key: b, rate_limit: {unit: hour, requests_per_unit: 1, algorithm: sliding_window, window_start: clock, time_zone: UTC}}
  - {key: c, rate_limit: {unit: hour, requests_per_unit: 0, algorithm: token_bucket, on_exceeded: renew_window}}
  - {key: d, rate_limit: {unit: hour, requests_per_unit: 1, time_zone: Europe/Berln}}
  - {key: e, rate_limit: {unit: day, unit_multiplier: 2, requests_per_unit: 1, time_zone: UTC, window_start: first_hit}}
  - {key: f, rate_limit: {unit: day, requests_per_unit: 1, on_exceeded: renew_window}}
  - {key: g, rate_limit: {unit: 5h, requests_per_unit: 1, window_start: first_hit, charge_refused: false, on_exceeded: {backoff: {}}}}
  - {key: h, rate_limit: {unlimited: true, ban: {after: 1}, algorithm: token_bucket}}
  - {key: i, rate_limits: [{unlimited: true}, {unit: day, requests_per_unit: 1}, {unit: day, requests_per_unit: 2}]}
  - {key: j, rate_limit: {unit: day, requests_per_unit: 1}, rate_limits: [{unit: hour, requests_per_unit: 1}]}
  - {key: k, rate_limits: []}
  - {key: l, value: x, value_cidr: 10.0.0.0/8}
",
        r#"
r.yaml:3:61: d.a.rate_limit: burst_size means nothing for algorithm: fixed_window; take it out, or write algorithm: token_bucket
r.yaml:4:88: d.b.rate_limit: window_start means nothing for algorithm: sliding_window; take it out, or write algorithm: fixed_window
r.yaml:4:109: d.b.rate_limit: time_zone means nothing for algorithm: sliding_window; take it out, or write algorithm: fixed_window
r.yaml:5:39: d.c.rate_limit: a token_bucket needs requests_per_unit: it would never be filled again; write a number from 1 on
r.yaml:5:86: d.c.rate_limit: on_exceeded means nothing for algorithm: token_bucket; take it out, or write algorithm: fixed_window
r.yaml:6:61: d.d.rate_limit: time_zone needs a single day, week, month or year; write one of these as unit, without unit_multiplier
r.yaml:6:72: d.d.rate_limit: time zone "Europe/Berln" is not known; did you mean Europe/Berlin?
r.yaml:7:80: d.e.rate_limit: time_zone means nothing for windows that start at the first hit; take out time_zone, or window_start: first_hit
r.yaml:7:80: d.e.rate_limit: time_zone needs a single day, week, month or year; write one of these as unit, without unit_multiplier
r.yaml:8:60: d.f.rate_limit: on_exceeded means nothing for windows of the clock: they end when the clock says; add window_start: first_hit, or take on_exceeded out
r.yaml:9:107: d.g.rate_limit: on_exceeded means nothing where refused calls are not charged; take out charge_refused: false, or on_exceeded
r.yaml:10:44: d.h.rate_limit: an unlimited limit has no ban; take out ban, or unlimited
r.yaml:10:61: d.h.rate_limit: an unlimited limit has no algorithm; take out algorithm, or unlimited
r.yaml:11:28: d.i.rate_limits: an unlimited limit means nothing beside others; take it out of the list
r.yaml:11:82: d.i.rate_limits: two limits with the same algorithm and window would share a counter; take it out of the list
r.yaml:12:61: d.j.rate_limits: a descriptor cannot have rate_limit and rate_limits; put all limits into rate_limits
r.yaml:13:14: d.k.rate_limits: rate_limits is empty; list limits in it, or take it out
r.yaml:14:24: d: a descriptor cannot have value and value_cidr; write two descriptors
"#,
    );
}

#[test]
fn values_of_added_keys_are_checked() {
    test(
        "domain: d
client_address:
  - {trusted: all}
  - {key: a, trusted: [loopbak, 10.0.0.1/8, 10.0.0.0/33], ipv4_prefix: 33, malformed: ignore}
  - {key: b, trusted: {hopps: 1}}
  - {key: b, trusted: {hops: 0}}
descriptors:
  - {key: a, rate_limit: {unit: 0s, requests_per_unit: 1}}
  - {key: b, rate_limit: {unit: min, requests_per_unit: 1, algorithm: leaky_bucket}}
  - {key: c, rate_limit: {unit: 200y, requests_per_unit: 1, window_start: frist_hit}}
  - {key: d, rate_limit: {unit: 40000d, requests_per_unit: 1, algorithm: sliding_window}}
  - {key: e, rate_limit: {unit: 5h, requests_per_unit: 1, ban: {for: soon}}}
  - {key: f, rate_limit: {unit: 5h, requests_per_unit: 1, ban: {after: 1, for: 10}}}
  - {key: g, rate_limit: {unit: 5h, requests_per_unit: 1, window_start: first_hit, on_exceeded: {backoff: {factor: 0.5, max: 1w}}}}
  - {key: h, rate_limit: {unit: 5h, requests_per_unit: 1, burst: {unit: 24h, requests_per_unit: 1, ban: {after: 1}}}}
  - {key: i, value_cidr: [10.0.0.0/8, 300.0.0.0/8]}
",
        r#"
r.yaml:3:5: d.client_address: client_address does not say for which key; write key: NAME
r.yaml:4:24: d.client_address: "loopbak" is no network; did you mean loopback?
r.yaml:4:33: d.client_address: "10.0.0.1/8" is no network; did you mean 10.0.0.0/8?
r.yaml:4:45: d.client_address: "10.0.0.0/33" is no network; write a network such as 10.0.0.0/8, an address, or loopback, linklocal or uniquelocal
r.yaml:4:59: d.client_address: ipv4_prefix must be from 0 to 32, not 33; write ipv4_prefix: 32 for single addresses
r.yaml:4:87: d.client_address: malformed "ignore" is not known; write previous, literal or refuse
r.yaml:5:24: d.client_address: unknown key 'hopps'; did you mean hops?
r.yaml:6:30: d.client_address: hops cannot be 0; write a whole number from 1 to 4294967295
r.yaml:8:33: d.a.rate_limit: unit "0s" is not known; write second, minute, hour, day, week, month or year, or a length such as 500ms, 10s, 15m, 5h or 3d
r.yaml:9:33: d.b.rate_limit: unit "min" is not known; did you mean minute?
r.yaml:9:71: d.b.rate_limit: algorithm "leaky_bucket" is not known; write fixed_window or sliding_window or token_bucket
r.yaml:10:33: d.c.rate_limit: unit "200y" is not known; write second, minute, hour, day, week, month or year, or a length such as 500ms, 10s, 15m, 5h or 3d
r.yaml:11:27: d.d.rate_limit: a window of more than 100 years; write a shorter one
r.yaml:12:64: d.e.rate_limit: the ban does not say after how many refusals; write after: 0 to ban at the first refusal, after: 3 to allow three
r.yaml:12:70: d.e.rate_limit: for "soon" is no length of time; write a number with a unit, such as 500ms, 10s, 15m, 5h or 3d
r.yaml:13:80: d.f.rate_limit: for "10" is no length of time; write a number with a unit, such as 500ms, 10s, 15m, 5h or 3d
r.yaml:14:108: d.g.rate_limit: factor must be from 1 to 1000000, not 0.5; 2 doubles the wait with each refused hit
r.yaml:14:126: d.g.rate_limit: max "1w" is no length of time; write a number with a unit, such as 500ms, 10s, 15m, 5h or 3d
r.yaml:15:73: d.h.rate_limit: unit "24h" is a day; write unit: day
r.yaml:15:100: d.h.rate_limit: ban cannot stand in burst; it belongs in rate_limit
r.yaml:16:39: d: "300.0.0.0/8" is no network; write a network such as 10.0.0.0/8, an address, or loopback, linklocal or uniquelocal
"#,
    );
}

#[test]
fn what_would_turn_a_key_into_its_opposite_is_refused() {
    test(
        "domain: d
charge: all_or_nothing
descriptors:
  - {key: a, rate_limit: {unit: hour, requests_per_unit: 1, algorithm: token_bucket, charge_refused: true}}
",
        "
r.yaml:4:86: d.a.rate_limit: charge_refused: true means nothing in a domain with charge: all_or_nothing; take out one of them
",
    );
    test(
        "domain: d
descriptors:
  - {key: a, rate_limit: {unit: minute, requests_per_unit: 1, window_start: first_hit, on_exceeded: {backoff: {max: 1s}}}}
",
        "
r.yaml:3:88: d.a.rate_limit: max is shorter than the window, so that a refused hit would shorten it; write at least the window's length, or take max out
",
    );
}

#[test]
fn addresses_for_a_key_that_no_rule_has_are_pointed_out() {
    test(
        "domain: d
client_address: [{key: xf, trusted: all}]
descriptors:
  - {key: xff, rate_limit: {unit: hour, requests_per_unit: 1}}
",
        "
r.yaml:2:24: warning: d.client_address: no rule has the key xf; did you mean xff?
",
    );
}

#[test]
fn replaces_of_nothing_is_pointed_out() {
    test(
        "domain: d
descriptors:
  - {key: a, rate_limit: {name: per-ip, unit: hour, requests_per_unit: 1}}
  - {key: b, rate_limit: {replaces: [{name: peer-ip}, {name: per-ip}], unit: hour, requests_per_unit: 1}}
",
        "
r.yaml:4:26: warning: d: replaces 'peer-ip', but no limit of the domain has that name; did you mean per-ip?
",
    );
}
