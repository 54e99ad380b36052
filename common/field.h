// The name and the value of an option or of a property, as text.
#pragma once
#include <string>
#include <vector>

struct Field {
    std::string name;
    std::string value;
    bool operator==(const Field&) const = default;
};
using Fields = std::vector<Field>;
