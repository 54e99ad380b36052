// One table of options is all that parsing, --help and the settings printed at start need.
#pragma once
#include <string>
#include <vector>

#include "common/field.h"

struct Option {
    enum Kind { Int, Float, String, Path, Choice, Flag };
    const char* name;    // "--batch"
    const char* letter;  // "-b", or "" if it has none
    Kind kind;
    void* value;  // int*, float*, bool* (Flag), std::string* (all others)
    const char* help;
    const char* range = "";  // Int/Float: "1..1024", "0..", "-1 or 1.." or ""; Choice: "bf16|fp32"
    const char* group = "";  // the heading in --help of this option and those after it
    bool given = false;      // on the command line. A flag given as 0 does not count
};
std::string title(const Option& option);  // for messages, for example "--batch (-b)"

// Accepts "--name value", "--name=value" and "-b value". Flags take no value, or "0" or "1". Throws
// a UsageError that names the option and the value. Returns Parsed::help at the first --help or -h.
// "-h 0" and "-h 1" are unknown options, because in llm.c they are about HellaSwag.
//
// A default that depends on the run is stored as a value outside of its option's range, or as ""
// for a path, so that no user can type it by chance. A few options accept it on purpose, as -1 or
// auto.
enum class Parsed { options, help };
Parsed parse_options(int argc, const char* const* argv, std::vector<Option>& table);

std::string options_help(const std::string& program, const std::string& about,
                         const std::vector<Option>& table);

// The options whose value is not the one in `defaults`: "batch  --batch 4  --overfit", a line per
// group.
std::string options_changed(const std::vector<Option>& table, const std::vector<Option>& defaults);

// The name and value of every option, except empty ones.
Fields options_settings(const std::vector<Option>& table);
