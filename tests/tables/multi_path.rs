// What GLAKE_MULTI_PATH means to the command, the library and the preload library alike: each value, and whether it switches on. None: it
// is refused. Unset is off.
[
    ("", Some(false)),
    (" ", Some(false)),
    ("0", Some(false)),
    (" 0 ", Some(false)),
    ("1", Some(true)),
    ("1 ", Some(true)),
    ("\t1", Some(true)),
    ("01", None),
    ("2", None),
    ("-1", None),
    ("true", None),
    ("on", None),
    ("1 1", None),
]
