#pragma once
typedef double CFTimeInterval; typedef const void* CFTypeRef; typedef double CGFloat; struct CGSize { CGFloat width, height; };
