//! How much memory the control group of this process may use.

use std::fs;
use std::path::Path;

/// The limit in bytes: the least of those of the group and all that it is in. `None` if there is none. In a container its own
/// group is often all that can be seen, at the root.
pub(super) fn memory_limit() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    limits_of(&groups, Path::new("/sys/fs/cgroup")).min()
}

/// `groups` has a line `number:controllers:path` for each hierarchy; version 2 has no controllers there.
fn limits_of(groups: &str, root: &Path) -> impl Iterator<Item = u64> {
    groups.lines().flat_map(move |line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, group) = (fields.next().unwrap_or(""), fields.next().unwrap_or(""));
        let (root, name) = match controllers {
            "" => (root.to_owned(), "memory.max"),
            "memory" => (root.join("memory"), "memory.limit_in_bytes"),
            _ => return Vec::new(),
        };
        let group = group.trim_start_matches('/');
        let limit = |group: &Path| -> Option<u64> {
            let text = fs::read_to_string(root.join(group).join(name)).ok()?;
            // Without a limit version 2 has a word, and version 1 a number near the largest.
            text.trim().parse().ok().filter(|limit| *limit < 1 << 50)
        };
        Path::new(group).ancestors().filter_map(limit).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_limit_of_the_group_and_its_parents_counts() {
        let root = tempfile::tempdir().unwrap();
        let set = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        set("pods/one/memory.max", "max\n");
        set("pods/memory.max", "600\n");
        set("memory/pods/memory.limit_in_bytes", "9223372036854771712\n");
        set("memory/memory.limit_in_bytes", "500\n");
        let least = |groups| limits_of(groups, root.path()).min();
        assert_eq!(least("0::/pods/one\n"), Some(600));
        assert_eq!(least("0::/elsewhere\n"), None);
        assert_eq!(least("5:cpu:/pods\n4:memory:/pods/gone\n"), Some(500));
        assert_eq!(least(""), None);
    }
}
