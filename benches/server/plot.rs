//! A drawing of the closed loop for the README: bars of the CPU time of each call, relative to the baseline's.

use std::fmt::Write as _;

use anyhow::{Context as _, ensure};
use serde_json::Value;

const COLOURS: [&str; 4] = ["#0969da", "#bf8700", "#8250df", "#1a7f37"];
const LEFT: f64 = 44.0;
const TOP: f64 = 56.0;
const HEIGHT: f64 = 200.0;
const BAR: f64 = 18.0;
const GAP: f64 = 16.0;

/// One bar.
struct Bar<'a> {
    /// What stands below the bars that belong together.
    group: String,
    server: &'a str,
    ratio: f64,
}

/// Draws what `closed` has written. The baseline is the line at 1.
pub(crate) fn draw(all: &Value) -> anyhow::Result<String> {
    ensure!(
        all["mode"] == "closed",
        "only what `closed` has measured can be drawn"
    );
    let results = all["results"].as_array().context("there are no results")?;
    let bars: Vec<_> = results.iter().filter_map(bar).collect();
    ensure!(!bars.is_empty(), "there is nothing but the baseline");
    let mut servers: Vec<_> = bars.iter().map(|bar| bar.server).collect();
    servers.sort_unstable();
    servers.dedup();
    let highest = bars.iter().map(|bar| bar.ratio).fold(1.0, f64::max);
    let y = |ratio: f64| TOP + HEIGHT * (1.0 - ratio / highest);

    let (mut x, mut drawn) = (LEFT, String::new());
    for group in bars.chunk_by(|a, b| a.group == b.group) {
        x += GAP;
        let middle = x + BAR * group.len() as f64 / 2.0;
        for bar in group {
            let place = servers.iter().position(|server| *server == bar.server);
            let colour = COLOURS[place.unwrap_or(0) % COLOURS.len()];
            let (top, centre, ratio) = (y(bar.ratio), x + BAR / 2.0, bar.ratio);
            let height = TOP + HEIGHT - top;
            writeln!(
                drawn,
                r#"<rect x="{x:.1}" y="{top:.1}" width="{BAR}" height="{height:.1}" fill="{colour}"/>
<text x="{centre:.1}" y="{:.1}" text-anchor="middle" font-size="8">{ratio:.2}</text>"#,
                top - 3.0
            )?;
            x += BAR;
        }
        for (line, text) in group[0].group.lines().enumerate() {
            let y = TOP + HEIGHT + 14.0 + 12.0 * line as f64;
            writeln!(
                drawn,
                r#"<text x="{middle:.1}" y="{y:.1}" text-anchor="middle">{}</text>"#,
                escaped(text)
            )?;
        }
    }
    let (right, bottom, one) = (x + GAP, TOP + HEIGHT, y(1.0));
    for (place, server) in servers.iter().enumerate() {
        let (x, colour) = (LEFT + 130.0 * place as f64, COLOURS[place % COLOURS.len()]);
        writeln!(
            drawn,
            r#"<text x="{x}" y="36" fill="{colour}">&#9632; {}</text>"#,
            escaped(server)
        )?;
    }
    let setting = |name: &str| escaped(all["setting"][name].as_str().unwrap_or_default());
    Ok(format!(
        r##"<svg xmlns="http://www.w3.org/2000/svg" width="{right:.0}" height="{:.0}" font-family="sans-serif" font-size="10">
<rect width="100%" height="100%" fill="white"/>
<text x="{LEFT}" y="18" font-size="13">CPU time of a call relative to a tonic server that decides nothing</text>
{drawn}<line x1="{LEFT}" x2="{right:.1}" y1="{bottom}" y2="{bottom}" stroke="#57606a"/>
<line x1="{LEFT}" x2="{right:.1}" y1="{one:.1}" y2="{one:.1}" stroke="#cf222e" stroke-dasharray="4 3"/>
<text x="{:.1}" y="{:.1}" text-anchor="end" fill="#cf222e">1.0</text>
<text x="{LEFT}" y="{:.1}" font-size="8" fill="#57606a">c: connections, m: calls under way on each. {}, tonic {}, {}</text>
</svg>
"##,
        bottom + 66.0,
        LEFT - 6.0,
        one + 4.0,
        bottom + 56.0,
        setting("processor"),
        setting("tonic"),
        setting("date"),
    ))
}

/// None for the baseline, and for servers whose CPU time is not known.
fn bar(result: &Value) -> Option<Bar<'_>> {
    let server = result["server"].as_str().filter(|server| *server != "baseline")?;
    Some(Bar {
        group: format!(
            "{}\nc={}\nm={}",
            result["size"].as_str()?,
            result["connections"],
            result["streams"]
        ),
        server,
        ratio: result["cpu_ratio"].as_f64()?,
    })
}

fn escaped(text: &str) -> String {
    let text = text.replace('&', "&amp;").replace('<', "&lt;");
    text.replace('>', "&gt;").replace('"', "&quot;")
}
