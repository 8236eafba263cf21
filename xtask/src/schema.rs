//! Records against their JSON Schemas of fixtures/schemas.
//!
//! The part of JSON Schema (draft 2020-12) that those schemas use, and not a word more: a schema
//! with another keyword is refused, so that nothing it asks for is passed over.

use std::collections::HashMap;

use anyhow::{Context, Result, anyhow, bail};
use regex_lite::Regex;
use serde_json::{Map, Value};

use crate::workspace::{read_text, root};

/// Keywords that say something to people.
const ANNOTATIONS: &[&str] = &["$schema", "$id", "title", "description", "$defs"];

/// A schema that was read and understood.
pub(crate) struct Schema {
    root: Value,
    name: String,
    /// Every regular expression in it.
    patterns: HashMap<String, Regex>,
}

impl Schema {
    /// The schema of `fixtures/schemas/NAME.json`.
    pub(crate) fn named(name: &str) -> Result<Self> {
        let path = root().join("fixtures").join("schemas").join(format!("{name}.json"));
        let schema: Value = serde_json::from_str(&read_text(&path)?)
            .with_context(|| format!("{} is no JSON", path.display()))?;
        Self::new(name, schema).with_context(|| path.display().to_string())
    }

    fn new(name: &str, root: Value) -> Result<Self> {
        let mut patterns = HashMap::new();
        understood(&root, &mut patterns)?;
        for (name, definition) in root["$defs"].as_object().into_iter().flatten() {
            understood(definition, &mut patterns).with_context(|| format!("$defs/{name}"))?;
        }
        Ok(Self { root, name: name.to_owned(), patterns })
    }

    /// Refuses a value that the schema does not describe, naming the place.
    pub(crate) fn validate(&self, value: &Value) -> Result<()> {
        self.at(&self.root, value).map_err(|fault| {
            let place = if fault.path.is_empty() { "the record" } else { &fault.path };
            anyhow!("{place} {} ({})", fault.why, self.name)
        })
    }

    /// As [`Schema::validate`], of one of its definitions.
    pub(crate) fn validate_as(&self, definition: &str, value: &Value) -> Result<()> {
        let schema = &self.root["$defs"][definition];
        if schema.is_null() {
            bail!("{} has no $defs/{definition}", self.name);
        }
        self.at(schema, value).map_err(|fault| {
            let place = if fault.path.is_empty() { definition } else { &fault.path };
            anyhow!("{place} {} ({})", fault.why, self.name)
        })
    }

    fn at(&self, schema: &Value, value: &Value) -> Result<(), Fault> {
        let Some(schema) = schema.as_object() else { return Ok(()) };
        for (keyword, wanted) in schema {
            self.keyword(keyword, wanted, schema, value)?;
        }
        Ok(())
    }

    fn keyword(
        &self,
        keyword: &str,
        wanted: &Value,
        schema: &Map<String, Value>,
        value: &Value,
    ) -> Result<(), Fault> {
        let number = value.as_f64();
        let bound = wanted.as_f64().unwrap_or(f64::NAN);
        match keyword {
            "$ref" => {
                let target =
                    wanted.as_str().and_then(|to| self.root.pointer(to.strip_prefix('#')?));
                let target = target
                    .ok_or_else(|| Fault::new(format!("refers to {wanted}, which is not")))?;
                self.at(target, value)
            }
            "type" => fault_unless(is_of_type(wanted, value), || {
                format!("is {}; it must be {}", kind(value), words(wanted))
            }),
            "const" => fault_unless(value == wanted, || format!("is {value}; it must be {wanted}")),
            "enum" => {
                fault_unless(wanted.as_array().is_some_and(|all| all.contains(value)), || {
                    format!("is {value}; it must be one of {}", words(wanted))
                })
            }
            "minimum" => fault_unless(number.is_none_or(|x| x >= bound), || {
                format!("is {value}; it must be at least {wanted}")
            }),
            "exclusiveMinimum" => fault_unless(number.is_none_or(|x| x > bound), || {
                format!("is {value}; it must be above {wanted}")
            }),
            "minLength" => {
                let length = value.as_str().map(|text| text.chars().count());
                fault_unless(length.is_none_or(|length| length as f64 >= bound), || {
                    format!("is {value}; it must have {wanted} letters or more")
                })
            }
            "pattern" => {
                let pattern = wanted.as_str().unwrap_or_default();
                let fits = value.as_str().is_none_or(|text| self.matches(pattern, text));
                fault_unless(fits, || format!("is {value}; it must match {wanted}"))
            }
            "minItems" => {
                let items = value.as_array().map(Vec::len);
                fault_unless(items.is_none_or(|items| items as f64 >= bound), || {
                    format!("has {} items; it must have {wanted} or more", items.unwrap_or(0))
                })
            }
            "minProperties" => {
                let count = value.as_object().map(Map::len);
                fault_unless(count.is_none_or(|count| count as f64 >= bound), || {
                    format!("has {} fields; it must have {wanted} or more", count.unwrap_or(0))
                })
            }
            "items" => {
                for (index, item) in value.as_array().into_iter().flatten().enumerate() {
                    self.at(wanted, item).map_err(|fault| fault.below(&format!("[{index}]")))?;
                }
                Ok(())
            }
            "required" => {
                let Some(object) = value.as_object() else { return Ok(()) };
                let mut names = wanted.as_array().into_iter().flatten().filter_map(Value::as_str);
                let missing = names.find(|name| !object.contains_key(*name));
                missing.map_or(Ok(()), |name| Err(Fault::new(format!("lacks `{name}`"))))
            }
            "properties" | "patternProperties" => self.fields(keyword, wanted, value),
            "additionalProperties" => self.additional(wanted, schema, value),
            _ => Ok(()),
        }
    }

    fn matches(&self, pattern: &str, text: &str) -> bool {
        self.patterns.get(pattern).is_some_and(|pattern| pattern.is_match(text))
    }

    fn fields(&self, keyword: &str, wanted: &Value, value: &Value) -> Result<(), Fault> {
        let (Some(wanted), Some(object)) = (wanted.as_object(), value.as_object()) else {
            return Ok(());
        };
        for (name, field) in object {
            for (key, schema) in wanted {
                let applies = match keyword {
                    "properties" => key == name,
                    _ => self.matches(key, name),
                };
                if applies {
                    self.at(schema, field).map_err(|fault| fault.below(name))?;
                }
            }
        }
        Ok(())
    }

    /// Fields that neither `properties` nor `patternProperties` names.
    fn additional(
        &self,
        wanted: &Value,
        schema: &Map<String, Value>,
        value: &Value,
    ) -> Result<(), Fault> {
        let keys = |keyword: &str| -> Vec<&String> {
            let named = schema.get(keyword).and_then(Value::as_object);
            named.into_iter().flatten().map(|(key, _)| key).collect()
        };
        let (names, patterns) = (keys("properties"), keys("patternProperties"));
        for (name, field) in value.as_object().into_iter().flatten() {
            if names.contains(&name) || patterns.iter().any(|p| self.matches(p, name)) {
                continue;
            }
            if *wanted == Value::Bool(false) {
                return Err(Fault::new(format!("has the field `{name}`, which nobody knows")));
            }
            self.at(wanted, field).map_err(|fault| fault.below(name))?;
        }
        Ok(())
    }
}

/// What is wrong, and where.
struct Fault {
    path: String,
    why: String,
}

impl Fault {
    fn new(why: String) -> Self {
        Self { path: String::new(), why }
    }

    /// The same, one step further in.
    fn below(self, step: &str) -> Self {
        let separator = if self.path.is_empty() || self.path.starts_with('[') { "" } else { "." };
        Self { path: format!("{step}{separator}{}", self.path), why: self.why }
    }
}

fn fault_unless(holds: bool, why: impl Fn() -> String) -> Result<(), Fault> {
    if holds { Ok(()) } else { Err(Fault::new(why())) }
}

/// Refuses a schema that asks for what is not checked here; takes in its patterns.
fn understood(schema: &Value, patterns: &mut HashMap<String, Regex>) -> Result<()> {
    let Some(object) = schema.as_object() else {
        return match schema {
            Value::Bool(_) => Ok(()),
            other => bail!("a schema is an object, not {other}"),
        };
    };
    for (keyword, wanted) in object {
        let inner = || format!("in `{keyword}`");
        match keyword.as_str() {
            "$ref" | "type" | "const" | "enum" | "minimum" | "exclusiveMinimum" | "minLength"
            | "minItems" | "minProperties" | "required" => {}
            "pattern" => take_in(wanted.as_str().with_context(inner)?, patterns)?,
            "items" | "additionalProperties" => {
                understood(wanted, patterns).with_context(inner)?;
            }
            "properties" | "patternProperties" => {
                for (name, schema) in wanted.as_object().with_context(inner)? {
                    if keyword == "patternProperties" {
                        take_in(name, patterns)?;
                    }
                    understood(schema, patterns).with_context(|| format!("in `{name}`"))?;
                }
            }
            other if ANNOTATIONS.contains(&other) => {}
            other => bail!("the keyword `{other}` is not one that is checked"),
        }
    }
    Ok(())
}

fn take_in(pattern: &str, patterns: &mut HashMap<String, Regex>) -> Result<()> {
    let read = Regex::new(pattern).with_context(|| format!("the pattern {pattern}"))?;
    patterns.insert(pattern.to_owned(), read);
    Ok(())
}

fn is_of_type(wanted: &Value, value: &Value) -> bool {
    let is = |name: &Value| match name.as_str() {
        Some("integer") => value.as_f64().is_some_and(|x| x.fract() == 0.0),
        name => name == Some(kind(value)),
    };
    wanted.as_array().map_or_else(|| is(wanted), |names| names.iter().any(is))
}

const fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

fn words(names: &Value) -> String {
    let word = |name: &Value| name.as_str().map_or_else(|| name.to_string(), str::to_owned);
    let all = |names: &Vec<Value>| names.iter().map(word).collect::<Vec<_>>().join(", ");
    names.as_array().map_or_else(|| word(names), all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn schema() -> Schema {
        let schema = json!({
            "type": "object", "required": ["name"], "additionalProperties": false,
            "minProperties": 1,
            "properties": {
                "name": {"type": "string", "minLength": 2, "pattern": "^[a-z]+$"},
                "kind": {"enum": ["a", "b"]},
                "count": {"type": "integer", "minimum": 1},
                "times": {"type": "array", "minItems": 2, "items": {"$ref": "#/$defs/time"}},
                "one": {"const": 1},
            },
            "patternProperties": {"_error$": {"type": ["number", "null"]}},
            "$defs": {"time": {"type": "number", "exclusiveMinimum": 0}},
        });
        Schema::new("test", schema).expect("it is understood")
    }

    #[test]
    fn what_fits_passes() {
        let value = json!({
            "name": "ab", "kind": "b", "count": 3, "times": [1, 0.5], "one": 1, "o_error": null,
        });
        schema().validate(&value).expect("it fits");
    }

    #[test]
    fn what_does_not_fit_is_named_with_its_place() {
        for (value, words) in [
            (json!([]), "the record is array; it must be object"),
            (json!({}), "the record has 0 fields"),
            (json!({"kind": "a"}), "the record lacks `name`"),
            (json!({"name": 3}), "name is number"),
            (json!({"name": "a"}), "name is \"a\"; it must have 2 letters"),
            (json!({"name": "a1"}), "it must match"),
            (json!({"name": "ab", "kind": "c"}), "kind is \"c\"; it must be one of a, b"),
            (json!({"name": "ab", "count": 0}), "count is 0; it must be at least 1"),
            (json!({"name": "ab", "count": 1.5}), "count is number; it must be integer"),
            (json!({"name": "ab", "times": [1]}), "times has 1 items"),
            (json!({"name": "ab", "times": [1, 0]}), "times[1] is 0; it must be above 0"),
            (json!({"name": "ab", "one": 2}), "one is 2; it must be 1"),
            (json!({"name": "ab", "o_error": "x"}), "o_error is string"),
            (json!({"name": "ab", "other": 1}), "has the field `other`"),
        ] {
            let why = schema().validate(&value).expect_err("it does not fit").to_string();
            assert!(why.contains(words), "{value}: {why}");
        }
    }

    #[test]
    fn a_schema_that_asks_for_more_is_refused() {
        let nested = json!({"properties": {"a": {"items": {"maximum": 3}}}});
        for schema in [json!({"maximum": 3}), json!({"pattern": "("}), nested, json!(3)] {
            assert!(Schema::new("test", schema).is_err());
        }
    }
}
