//! A run as a table for a spreadsheet: a line a workload and contender.

use super::record::{OURS, Run};
use super::statistics::Spread;

const HEAD: &str = "device,date,type,pass,causal,deterministic,options,d,dv,s,sk,b,heads,kv_heads,\
    contender,kernel,samples,median_ms,least_ms,most_ms,iqr_ms,tflops,sm_mhz,throttled_by";

/// The text of the file.
pub(super) fn text(run: &Run) -> String {
    let mut text = format!("{HEAD}\n");
    for row in &run.rows {
        let w = &row.workload;
        let options = serde_json::to_string(&w.options).unwrap_or_default();
        for (contender, samples) in &row.ms {
            let spread = Spread::of(samples);
            let kernel = row.kernel.as_deref().filter(|_| contender == OURS).unwrap_or_default();
            let clock = row.clock.as_ref();
            let fields = [
                run.device.name.clone(),
                run.date.clone(),
                w.dtype.clone(),
                format!("{:?}", w.direction).to_lowercase(),
                w.causal.to_string(),
                w.deterministic.to_string(),
                options.clone(),
                w.d.to_string(),
                w.dv.to_string(),
                w.s.to_string(),
                w.sk.to_string(),
                w.b.to_string(),
                w.heads.to_string(),
                w.kv_heads.to_string(),
                contender.clone(),
                kernel.to_owned(),
                samples.len().to_string(),
                spread.median.to_string(),
                spread.least.to_string(),
                spread.most.to_string(),
                spread.interquartile.to_string(),
                row.tera(contender).unwrap_or(f64::NAN).to_string(),
                clock.and_then(|clock| clock.sm_mhz).map_or_else(String::new, |m| m.to_string()),
                clock.map_or_else(String::new, |clock| clock.throttled_by.join("; ")),
            ];
            text.push_str(&fields.map(|field| quoted(&field)).join(","));
            text.push('\n');
        }
    }
    text
}

/// A field, in quotes where RFC 4180 wants them.
fn quoted(field: &str) -> String {
    if field.contains([',', '"', '\n', '\r']) {
        format!("\"{}\"", field.replace('"', "\"\""))
    } else {
        field.to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::record::tests::run;

    #[test]
    fn lines_have_the_heads_fields() {
        let mut run = run(&[2.0; 20]);
        run.rows[0].workload.options.softcap = Some(30.0);
        let text = text(&run);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 2);
        assert!(lines[1].starts_with("a processor,1970-01-01T00:00:00Z,f32,forward,false,false,"));
        assert!(lines[1].contains("\"{\"\"softcap\"\":30.0}\""), "{text}");
        assert_eq!(lines[0].split(',').count(), lines[1].split(',').count());
        assert_eq!(quoted("a,\"b\""), "\"a,\"\"b\"\"\"");
    }
}
