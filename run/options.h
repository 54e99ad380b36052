// One table of options drives parsing, --help and the settings printed at start.
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
    const char* group = "";  // heading above it in --help, which those after it share
    // On the command line. A flag that was given as 0 asks for nothing, so it does not count.
    bool given = false;
};
std::string title(const Option& option);  // how messages name it, for example "--batch (-b)"

// Accepts "--name value", "--name=value" and "-b value". Flags take no value, or "0"/"1". Throws
// a UsageError that names the option and the value. Returns Parsed::help at the first --help or -h;
// llm.c's "-h 0" and "-h 1" are not requests for help.
//
// A default that depends on the run is stored as a value outside of its option's range, or as ""
// for a path, so that no user can type it by chance.
enum class Parsed { options, help };
Parsed parse_options(int argc, const char* const* argv, std::vector<Option>& table);
std::string options_help(const std::string& program, const std::string& about,
                         const std::vector<Option>& table);
// Those whose value is not the one in `defaults`: "  --batch 4  --overfit".
std::string options_changed(const std::vector<Option>& table, const std::vector<Option>& defaults);
// name and current value of each option that has one
Fields options_settings(const std::vector<Option>& table);
